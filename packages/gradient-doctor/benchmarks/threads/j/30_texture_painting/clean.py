import torch
import torch.nn as nn


class TextureField(nn.Module):
    """Coordinate network that holds the texture of an atlas."""

    def __init__(self, freqs=4, width=48):
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(freqs))
        self.net = nn.Sequential(nn.Linear(4 * freqs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                 nn.Linear(width, 3))

    def forward(self, uv):
        ang = (uv.unsqueeze(-1) * self.bands).flatten(1)
        return torch.sigmoid(self.net(torch.cat([ang.sin(), ang.cos()], 1)))


def atlas(size=20):
    lin = torch.linspace(-1, 1, size)
    return torch.stack(torch.meshgrid(lin, lin, indexing="ij"), -1).view(-1, 2)


def fit_base(field, uv, base, steps=150):
    opt = torch.optim.Adam(field.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = (field(uv) - base).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"base texture error {loss.item():.5f}")


def project_back(field, uv, target, mask, steps=150):
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
    before = field(uv).detach()
    for it in range(1, steps + 1):
        pred = field(uv)
        loss = ((pred - target).pow(2) * mask).mean() + ((pred - before).pow(2) * (1 - mask)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 30 == 0:
            with torch.no_grad():
                new = field(uv)
                inside = ((new - target).pow(2) * mask).sum() / mask.sum()
                outside = ((new - before).pow(2) * (1 - mask)).sum() / (1 - mask).sum()
            print(f"it {it}  painted region {inside.item() / 3:.5f}  rest of the texture {outside.item() / 3:.5f}")


def main():
    torch.manual_seed(0)
    uv = atlas()
    base = torch.stack([0.5 + 0.4 * torch.sin(4 * uv[:, 0]), 0.5 + 0.3 * torch.cos(5 * uv[:, 1]),
                        0.5 + 0.2 * torch.sin(3 * uv.sum(1))], 1)
    mask = (uv[:, :1] > 0.1).float() * (uv[:, 1:] > -0.3).float()
    target = torch.tensor([0.9, 0.2, 0.1]).expand_as(base)
    field = TextureField()
    fit_base(field, uv, base)
    project_back(field, uv, target, mask)


if __name__ == "__main__":
    main()
