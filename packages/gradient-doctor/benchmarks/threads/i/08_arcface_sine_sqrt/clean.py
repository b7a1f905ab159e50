import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(8)


class ArcMarginProduct(nn.Module):
    def __init__(self, in_features, n_classes, s=16.0, m=0.3):
        super().__init__()
        self.s, self.m = s, m
        self.weight = nn.Parameter(torch.empty(n_classes, in_features))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, features, label):
        cosine = F.linear(F.normalize(features), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - torch.pow(cosine, 2)).clamp(1e-6, 1))
        phi = cosine * math.cos(self.m) - sine * math.sin(self.m)
        one_hot = F.one_hot(label, cosine.size(1)).to(cosine.dtype)
        return self.s * (one_hot * phi + (1.0 - one_hot) * cosine)


class FaceNet(nn.Module):
    def __init__(self, pixels=48, dim=2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(pixels, 64), nn.PReLU(), nn.Linear(64, 32), nn.PReLU(), nn.Linear(32, dim))

    def forward(self, x):
        return self.net(x)


def make_faces(n, identities, pixels=48):
    label = torch.randint(0, len(identities), (n,))
    return identities[label] + 0.2 * torch.randn(n, pixels), label


identities = torch.randn(6, 48)
model, margin = FaceNet(), ArcMarginProduct(2, 6)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": margin.parameters()}], lr=2e-3)

for it in range(501):
    x, label = make_faces(64, identities)
    output = margin(model(x), label)
    loss = criterion(output, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 50 == 0:
        acc = (output.argmax(dim=1) == label).float().mean().item()
        print(f"iter {it:3d} loss {loss.item():.4f} acc {acc:.3f}")
