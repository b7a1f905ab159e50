import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(3)


class TopDownNet(nn.Module):
    """Predicts for each cell of a ground grid: is a car there, where in the cell, how large."""

    def __init__(self, ch=16):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(4, ch, 3, padding=1), nn.GroupNorm(4, ch), nn.ReLU(),
            nn.Conv2d(ch, ch, 3, padding=1), nn.GroupNorm(4, ch), nn.ReLU(),
        )
        self.score_head = nn.Conv2d(ch, 1, 1)
        self.offset_head = nn.Conv2d(ch, 2, 1)
        self.size_head = nn.Conv2d(ch, 2, 1)

    def forward(self, grid):
        h = self.trunk(grid)
        return {"score": self.score_head(h), "offset": self.offset_head(h), "size": self.size_head(h)}


def make_scene(n=16, side=12):
    grid = 0.1 * torch.randn(n, 4, side, side)
    truth = {
        "score": (torch.rand(n, 1, side, side) < 0.1).float(),
        "offset": torch.rand(n, 2, side, side) - 0.5,
        "size": 1.5 + torch.rand(n, 2, side, side),
    }
    seen = torch.cat([truth["offset"], truth["size"]], 1)
    return grid + truth["score"] * seen, truth


def compute_loss(pred, truth, weights):
    cars = truth["score"]
    parts = {
        "score": F.binary_cross_entropy_with_logits(pred["score"], cars),
        "offset": ((pred["offset"] - truth["offset"]).abs() * cars).sum() / (2 * cars.sum()),
        "size": ((pred["size"] - truth["size"]).abs() * cars).sum() / (2 * cars.sum()),
    }
    total = sum(weights[k] * v for k, v in parts.items())
    total = parts["score"]
    return total, parts


def run_epoch(model, optimizer, epoch, iterations=25):
    weights = {"score": 1.0, "offset": 1.0, "size": 1.0}
    meter = {k: 0.0 for k in weights}
    for _ in range(iterations):
        grid, truth = make_scene()
        optimizer.zero_grad()
        total, parts = compute_loss(model(grid), truth, weights)
        total.backward()
        optimizer.step()
        for k in parts:
            meter[k] += parts[k].item() / iterations
    print(f"epoch {epoch}", " ".join(f"{k} {v:.3f}" for k, v in meter.items()))


if __name__ == "__main__":
    net = TopDownNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(6):
        run_epoch(net, opt, epoch)
