import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def mlp(sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
    return nn.Sequential(*layers[:-2])


def D(p, z):
    return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=-1).mean()


class BYOL(nn.Module):
    def __init__(self, dim=24, momentum=0.99):
        super().__init__()
        self.online_encoder = mlp([dim, 64, 32])
        self.target_encoder = copy.deepcopy(self.online_encoder)
        for p in self.target_encoder.parameters():
            p.requires_grad_(False)
        self.online_predictor = mlp([32, 64, 32])
        self.momentum = momentum

    @torch.no_grad()
    def update_moving_average(self):
        for online, target in zip(self.online_encoder.parameters(), self.target_encoder.parameters()):
            target.mul_(self.momentum).add_(online, alpha=1 - self.momentum)

    def forward(self, x1, x2):
        z1, z2 = self.online_encoder(x1), self.online_encoder(x2)
        p1, p2 = self.online_predictor(z1), self.online_predictor(z2)
        with torch.no_grad():
            t1, t2 = self.target_encoder(x1), self.target_encoder(x2)
        return D(p1, t2) / 2 + D(p2, t1) / 2


centers = torch.randn(5, 24)
mixing = torch.linalg.qr(torch.randn(24, 24)).Q


def sample(n=96):
    label = torch.randint(0, 5, (n,))
    clean = centers[label] + 0.4 * torch.randn(n, 24)
    views = [(clean + 0.8 * torch.randn_like(clean)) @ mixing for _ in range(2)]
    return views[0], views[1], label


@torch.no_grad()
def distance_of_networks(model):
    pairs = zip(model.online_encoder.parameters(), model.target_encoder.parameters())
    return sum((a - b).pow(2).sum() for a, b in pairs).sqrt().item()


model = BYOL()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(301):
    x1, x2, _ = sample()
    loss = model(x1, x2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 75 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}  |online - target| {distance_of_networks(model):.3f}")
