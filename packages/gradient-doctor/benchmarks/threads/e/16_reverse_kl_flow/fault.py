import math
import torch
import torch.nn as nn

torch.manual_seed(0)


class Coupling(nn.Module):
    def __init__(self, swap, width=32):
        super().__init__()
        self.swap = swap
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 2))
        nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)

    def forward(self, z):
        a, b = z.flip(1).chunk(2, 1) if self.swap else z.chunk(2, 1)
        shift, log_scale = self.net(a).chunk(2, 1)
        log_scale = torch.tanh(log_scale)
        b = b * log_scale.exp() + shift
        out = torch.cat([b, a] if self.swap else [a, b], 1)
        return out, log_scale.squeeze(1)

    def inverse(self, x):
        a, b = x.flip(1).chunk(2, 1) if self.swap else x.chunk(2, 1)
        shift, log_scale = self.net(a).chunk(2, 1)
        log_scale = torch.tanh(log_scale)
        b = (b - shift) * (-log_scale).exp()
        return torch.cat([b, a] if self.swap else [a, b], 1), -log_scale.squeeze(1)


class NormalizingFlow(nn.Module):
    def __init__(self, flows):
        super().__init__()
        self.flows = nn.ModuleList(flows)

    def forward_and_log_det(self, z):
        log_det = torch.zeros(len(z))
        for flow in self.flows:
            z, log_d = flow(z)
            log_det -= log_d
        return z, log_det

    def inverse_and_log_det(self, x):
        log_det = torch.zeros(len(x))
        for flow in reversed(self.flows):
            x, log_d = flow.inverse(x)
            log_det += log_d
        return x, log_det


def base_log_prob(z):
    return -0.5 * z.pow(2).sum(1) - math.log(2 * math.pi)


def target_log_prob(x):
    """banana: x0 ~ N(0, 1.5), x1 | x0 ~ N(x0^2 / 3, 0.5)"""
    lp0 = -0.5 * (x[:, 0] / 1.5) ** 2 - math.log(1.5)
    lp1 = -0.5 * ((x[:, 1] - x[:, 0] ** 2 / 3) / 0.5) ** 2 - math.log(0.5)
    return lp0 + lp1 - math.log(2 * math.pi)


flow = NormalizingFlow([Coupling(i % 2 == 1) for i in range(6)])
optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)
for it in range(401):
    z = torch.randn(256, 2)
    x, log_det = flow.forward_and_log_det(z)
    log_q = base_log_prob(z) - log_det
    kl = (log_q - target_log_prob(x)).mean()
    optimizer.zero_grad()
    kl.backward()
    optimizer.step()
    if it % 80 == 0:
        print(f"it {it} kl {kl.item():.3f} spread of x0 {x[:, 0].std().item():.3f} (1.5 in the target)")
