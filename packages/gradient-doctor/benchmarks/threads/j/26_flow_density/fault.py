import math
import torch
import torch.nn as nn


class Coupling(nn.Module):
    def __init__(self, flip, width=32):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def parts(self, v):
        a, b = v[:, :1], v[:, 1:]
        return (b, a) if self.flip else (a, b)

    def merge(self, keep, change):
        return torch.cat([change, keep] if self.flip else [keep, change], 1)

    def params(self, keep):
        log_scale, shift = self.net(keep).chunk(2, 1)
        return 2.0 * torch.tanh(log_scale / 2.0), shift

    def forward(self, x):
        keep, change = self.parts(x)
        log_scale, shift = self.params(keep)
        y = self.merge(keep, change * log_scale.exp() + shift)
        return y, log_scale.sum(1)

    def inverse(self, y):
        keep, change = self.parts(y)
        log_scale, shift = self.params(keep)
        x = self.merge(keep, (change - shift) * (-log_scale).exp())
        return x, log_scale.sum(1)


class Flow(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.bijectors = nn.ModuleList(Coupling(flip=bool(i % 2)) for i in range(layers))

    def log_prob(self, y):
        total = torch.zeros(len(y))
        for bijector in reversed(self.bijectors):
            y, log_det = bijector.inverse(y)
            total = total + log_det
        return total + (-0.5 * y ** 2 - 0.5 * math.log(2 * math.pi)).sum(1)

    @torch.no_grad()
    def sample(self, n):
        x = torch.randn(n, 2)
        for bijector in self.bijectors:
            x, _ = bijector(x)
        return x


def sample_data(n):
    x = 1.5 * torch.randn(n)
    return torch.stack([x, 0.5 * x ** 2 - 1.0 + 0.3 * torch.randn(n)], 1)


def main():
    torch.manual_seed(0)
    flow = Flow()
    optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
    for it in range(1, 301):
        loss = -flow.log_prob(sample_data(128)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 60 == 0:
            s = flow.sample(2000)
            print(f"it {it}  nll {loss.item():.3f}  std of samples {s[:, 0].std():.2f} {s[:, 1].std():.2f} (data 1.50 1.61)")


if __name__ == "__main__":
    main()
