import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self, d_in, d_z):
        super().__init__()
        self.q = nn.Linear(d_in, 2 * d_z)

    def forward(self, h):
        mu, logvar = self.q(h).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        kl = 0.5 * (mu ** 2 + logvar.exp() - logvar - 1).sum(-1)
        return z, kl


class LadderVAE(nn.Module):
    def __init__(self, d_x=64, d_h=64, z_dims=(16, 8)):
        super().__init__()
        self.z_dims = z_dims
        self.enc1 = nn.Sequential(nn.Linear(d_x, d_h), nn.ReLU())
        self.enc2 = nn.Sequential(nn.Linear(d_h, d_h), nn.ReLU())
        self.bottom = Layer(d_h, z_dims[0])
        self.top = Layer(d_h, z_dims[1])
        self.dec = nn.Sequential(nn.Linear(sum(z_dims), d_h), nn.ReLU(), nn.Linear(d_h, d_x))

    def forward(self, x):
        h1 = self.enc1(x)
        h2 = self.enc2(h1)
        z1, kl1 = self.bottom(h1)
        z2, kl2 = self.top(h2)
        return self.dec(torch.cat([z1, z2], -1)), torch.stack([kl1, kl2], dim=1)


def free_bits_kl(kl, free_bits):
    return torch.clamp(kl.mean(0), min=free_bits)


def kl_divergence_loss(kl, n_pixels, free_bits=1.0):
    kl = free_bits_kl(kl, free_bits)
    kl = kl / n_pixels
    return kl.sum()


def patches(n):
    t = torch.linspace(0, 6.28, 64)
    phase, freq = torch.rand(n, 1) * 6.28, 1 + 2 * torch.rand(n, 1)
    return torch.sin(freq * t + phase) + 0.1 * torch.randn(n, 64)


model = LadderVAE()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
kl_weight = 1.0
for step in range(600):
    x = patches(64)
    recon, kl = model(x)
    recon_loss = F.mse_loss(recon, x)
    kl_loss = kl_divergence_loss(kl, n_pixels=x.shape[1])
    loss = recon_loss + kl_weight * kl_loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 100 == 99:
        per_layer = " ".join(f"{v:8.2f}" for v in kl.mean(0).tolist())
        print(f"step {step + 1}  recon {recon_loss.item():.4f}  kl loss {kl_loss.item():.4f}  nats per layer {per_layer}")
