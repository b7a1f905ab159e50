import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class PlaceNet(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, dim), nn.ReLU(), nn.Linear(dim, dim))
        layer = nn.TransformerEncoderLayer(dim, nhead=4, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x, crossimage=True):
        desc = self.backbone(x)
        if crossimage:
            desc = self.encoder(desc.unsqueeze(0)).squeeze(0)
        return F.normalize(desc, dim=-1)


def multi_similarity(desc, labels, alpha=2.0, beta=20.0, base=0.5):
    sim = desc @ desc.T
    same = labels[:, None] == labels[None, :]
    eye = torch.eye(len(labels), dtype=torch.bool)
    pos = torch.where(same & ~eye, torch.exp(-alpha * (sim - base)), torch.zeros_like(sim)).sum(1)
    neg = torch.where(~same, torch.exp(beta * (sim - base)), torch.zeros_like(sim)).sum(1)
    return (torch.log1p(pos) / alpha + torch.log1p(neg) / beta).mean()


places = torch.randn(30, 20)
model = PlaceNet()
optimizer = torch.optim.Adam(model.backbone.parameters(), lr=2e-3)
optim_encoder = torch.optim.Adam(model.encoder.parameters(), lr=2e-3)
before = [p.detach().clone() for p in model.encoder.parameters()]

for step in range(200):
    labels = torch.randint(0, 30, (8,)).repeat_interleave(4)
    images = places[labels] + 0.8 * torch.randn(32, 20)
    loss = multi_similarity(model(images), labels)
    optimizer.zero_grad()
    optim_encoder.zero_grad()
    loss.backward()
    optimizer.step()
    for p in model.encoder.parameters():
        p.requires_grad = True
    optim_encoder.step()
    if step % 40 == 39:
        moved = sum((p - b).norm().item() for p, b in zip(model.encoder.parameters(), before))
        print(f"step {step + 1}: loss {loss.item():.4f}  encoder moved {moved:.3f}")
