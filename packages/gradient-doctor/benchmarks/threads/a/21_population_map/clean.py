import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)


class ScaleNet(nn.Module):
    """Occupancy per building from stacked map layers."""

    def __init__(self, layers=4, hidden=12):
        super().__init__()
        self.c1 = nn.Conv2d(layers, hidden, 1)
        self.c2 = nn.Conv2d(hidden, hidden, 1)
        self.out = nn.Conv2d(hidden, 1, 1)

    def forward(self, maps):
        h = F.relu(self.c1(maps))
        h = F.relu(self.c2(h))
        return F.softplus(self.out(h))


def regions(n=24, size=10):
    maps = torch.rand(n, 4, size, size)
    buildings = (torch.rand(n, 1, size, size) < 0.3).float()
    occupancy = 1.0 + 2.0 * maps[:, :1] + maps[:, 1:2]
    census = (occupancy * buildings).sum(dim=(1, 2, 3))
    return maps, buildings, census


def train(steps=30):
    maps, buildings, census = regions()
    model = ScaleNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(steps):
        estimate = (model(maps) * buildings).sum(dim=(1, 2, 3))
        loss = F.l1_loss(estimate, census)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:2d} mae {loss.item():8.3f} mean estimate {estimate.mean().item():8.3f}")


if __name__ == "__main__":
    train()
