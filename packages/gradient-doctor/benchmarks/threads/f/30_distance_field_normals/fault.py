import torch
import torch.nn as nn
import torch.nn.functional as F


class GridEncoding(nn.Module):
    """Trainable features on a coarse and a fine grid, read bilinearly."""

    def __init__(self, sizes=(6, 14), features=4):
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(0.05 * torch.randn(s, s, features)) for s in sizes)

    def read(self, table, xy):
        s = table.size(0)
        pos = (xy.clamp(-0.999, 0.999) + 1) / 2 * (s - 1)
        low = pos.detach().floor().long()
        w = pos - low
        i, j = low.unbind(-1)
        wx, wy = w[:, :1], w[:, 1:]
        wx, wy = wx * wx * (3 - 2 * wx), wy * wy * (3 - 2 * wy)
        return (table[i, j] * (1 - wx) * (1 - wy) + table[i + 1, j] * wx * (1 - wy)
                + table[i, j + 1] * (1 - wx) * wy + table[i + 1, j + 1] * wx * wy)

    def forward(self, xy):
        return torch.cat([xy] + [self.read(t, xy) for t in self.tables], -1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = GridEncoding()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.Softplus(beta=10), nn.Linear(32, 1))

    def sdf(self, xy):
        with torch.no_grad():
            enc = self.encoder(xy)
        return self.net(enc)

    def normals(self, xy):
        xy = xy.requires_grad_(True)
        d = self.sdf(xy)
        (g,) = torch.autograd.grad(d, xy, torch.ones_like(d), create_graph=True)
        return d, g


def true_distance(xy):
    return (xy - torch.tensor([0.1, -0.2])).norm(dim=-1, keepdim=True) - 0.5


def main():
    torch.manual_seed(77)
    field = Field()
    opt = torch.optim.Adam([
        {"params": field.encoder.parameters(), "lr": 1e-2},
        {"params": field.net.parameters(), "lr": 3e-3},
    ])
    for step in range(1, 401):
        xy = torch.rand(256, 2) * 2 - 1
        d, g = field.normals(xy)
        fit = F.l1_loss(d, true_distance(xy.detach()))
        eikonal = (g.norm(dim=-1) - 1).pow(2).mean()
        loss = fit + 0.02 * eikonal
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 80 == 0:
            print(f"step {step} distance error {fit.item():.4f} | |normal|-1 |^2 {eikonal.item():.4f}")


main()
