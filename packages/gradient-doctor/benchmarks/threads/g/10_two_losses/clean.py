import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(6)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return torch.tanh(self.body(x))


encoder = Encoder()
decoder = nn.Linear(8, 20)
classifier = nn.Linear(8, 3)
params = list(encoder.parameters()) + list(decoder.parameters()) + list(classifier.parameters())
optimizer = torch.optim.Adam(params, lr=5e-3)

label = torch.randint(0, 3, (300,))
basis = torch.randn(3, 20)
data = basis[label] + 0.4 * torch.randn(300, 20)

for epoch in range(60):
    optimizer.zero_grad()
    code = encoder(data)
    rec_loss = F.mse_loss(decoder(code), data)
    cls_loss = F.cross_entropy(classifier(code), label)
    rec_loss.backward(retain_graph=True)
    cls_loss.backward()
    optimizer.step()
    if epoch % 12 == 0 or epoch == 59:
        print(f"epoch {epoch:2d}  rec {rec_loss.item():.4f}  cls {cls_loss.item():.4f}")
