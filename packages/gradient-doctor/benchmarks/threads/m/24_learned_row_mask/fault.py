import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class ThresholdPooling(nn.Module):
    """Averages the rows whose norm stays below a learned threshold."""

    def __init__(self, start=6.0):
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(start))

    def forward(self, x):
        norms = x.norm(dim=-1)
        mask = (norms < self.threshold).float()
        weights = mask / mask.sum(dim=1, keepdim=True).clamp(min=1e-6)
        return (weights.unsqueeze(-1) * x).sum(dim=1)


class SetRegressor(nn.Module):
    def __init__(self, dim=3):
        super().__init__()
        self.pool = ThresholdPooling()
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        return self.out(self.pool(x))


def make_sets(batch=64, rows=20, dim=3):
    center = torch.randn(batch, 1, dim) * 0.5
    x = center + 0.5 * torch.randn(batch, rows, dim)
    outlier = torch.rand(batch, rows, 1) < 0.3
    x = torch.where(outlier, 4.5 * F.normalize(torch.randn(batch, rows, dim), dim=-1), x)
    return x, center.squeeze(1)


model = SetRegressor()
optimizer = torch.optim.Adam([
    {"params": model.pool.parameters(), "lr": 3e-2},
    {"params": model.out.parameters(), "lr": 1e-2},
])
for step in range(300):
    x, center = make_sets()
    loss = F.mse_loss(model(x), center)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 59:
        print(f"step {step + 1}: mse {loss.item():.4f}  threshold {model.pool.threshold.item():.3f}")
