import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)


class CageNet(nn.Module):
    """Predicts a source cage and a displaced cage for a 2-d point set."""

    def __init__(self, n_points, n_cage, hidden=64):
        super().__init__()
        self.n_cage = n_cage
        self.encoder = nn.Sequential(nn.Linear(n_points * 2, hidden), nn.ReLU())
        self.cage_head = nn.Linear(hidden, n_cage * 2)
        self.offset_head = nn.Linear(2 * hidden, n_cage * 2)
        angle = torch.arange(n_cage) * (2 * torch.pi / n_cage)
        self.register_buffer("template", 1.5 * torch.stack([angle.cos(), angle.sin()], dim=1))

    def coordinates(self, points, cage):
        d2 = (points.unsqueeze(2) - cage.unsqueeze(1)).pow(2).sum(-1)
        w = 1.0 / (d2 + 1e-2)
        return w / w.sum(dim=-1, keepdim=True)

    def forward(self, source, target):
        hs = self.encoder(source.flatten(1))
        ht = self.encoder(target.flatten(1))
        cage = self.template + 0.5 * self.cage_head(hs).view(-1, self.n_cage, 2)
        new_cage = cage + self.offset_head(torch.cat([hs, ht], dim=1)).view(-1, self.n_cage, 2)
        weights = self.coordinates(source, cage)
        deformed = torch.bmm(weights, new_cage)
        return {"deformed": deformed, "weights": weights}


def weight_regularizer(weights):
    return weights.pow(2).sum(dim=-1).mean()


def make_batch(n, n_points):
    src = torch.randn(n, n_points, 2)
    src = src / src.norm(dim=-1, keepdim=True) * (0.4 + 0.8 * torch.rand(n, n_points, 1))
    scale = 0.6 + 0.6 * torch.rand(n, 1, 2)
    return src, src * scale


net = CageNet(n_points=32, n_cage=8)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
reg_weight = 2.0

for it in range(400):
    source, target = make_batch(32, 32)
    out = net(source, target)
    shape_loss = F.mse_loss(out["deformed"], target)
    wreg = weight_regularizer(out["weights"])
    loss = shape_loss + reg_weight * wreg
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 50 == 0 or it == 399:
        print(f"iter {it:4d}  total {loss.item():.4f}  shape {shape_loss.item():.4f}  wreg {wreg.item():.4f}")
