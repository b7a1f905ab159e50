import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
X_DIM, Z_DIM, N_FLOWS = 12, 2, 4


class PlanarFlow(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.u = nn.Parameter(0.1 * torch.randn(dim))
        self.w = nn.Parameter(0.1 * torch.randn(dim))
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, z):
        uw = self.u @ self.w
        u_hat = self.u + (F.softplus(uw) - 1 - uw) * self.w / (self.w @ self.w + 1e-6)
        act = torch.tanh(z @ self.w + self.b)
        psi = (1 - act ** 2).unsqueeze(1) * self.w
        log_det = (1 + psi @ u_hat).abs().clamp(min=1e-4).log()
        return z + u_hat * act.unsqueeze(1), log_det


class NormalizingFlows(nn.Module):
    def __init__(self, dim, n_flows):
        super().__init__()
        self.flows = nn.ModuleList(PlanarFlow(dim) for _ in range(n_flows))

    def forward(self, z):
        total = 0.0
        for flow in self.flows:
            z, log_det = flow(z)
            total = total + log_det
        return z, total


def log_gaussian(x, mu, log_var):
    return (-0.5 * math.log(2 * math.pi) - log_var / 2 - (x - mu) ** 2 / (2 * log_var.exp())).sum(-1)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(X_DIM, 48), nn.ReLU(), nn.Linear(48, 2 * Z_DIM))
        self.dec = nn.Sequential(nn.Linear(Z_DIM, 48), nn.ReLU(), nn.Linear(48, X_DIM))
        self.flow = NormalizingFlows(Z_DIM, N_FLOWS)

    def forward(self, x):
        mu, log_var = self.enc(x).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        f_z, log_det_z = self.flow(z)
        qz = log_gaussian(z, mu, log_var) - log_det_z
        pz = log_gaussian(f_z, torch.zeros_like(f_z), torch.zeros_like(f_z))
        return self.dec(f_z), qz - pz, f_z


mix = torch.randn(2, X_DIM)

def data(n):
    angle = 2 * math.pi * torch.rand(n, 1)
    ring = torch.cat([angle.cos(), angle.sin()], dim=1)
    return torch.tanh(ring @ mix) + 0.1 * torch.randn(n, X_DIM)


model = VAE()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(501):
    x = data(64)
    recon, kl, code = model(x)
    likelihood = -F.mse_loss(recon, x, reduction="none").sum(1) / (2 * 0.1 ** 2)
    elbo = likelihood - kl
    loss = -elbo.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 100 == 0:
        print(f"step {step}  -elbo {loss.item():9.2f}  recon {-likelihood.mean().item():7.2f}  kl {kl.mean().item():9.2f}  latent std {code.std().item():7.2f}")
