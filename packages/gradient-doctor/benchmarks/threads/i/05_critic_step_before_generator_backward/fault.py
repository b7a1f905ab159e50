import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)


class Denoiser(nn.Module):
    def __init__(self, dim=12, code=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, code))
        self.dec = nn.Sequential(nn.Linear(code, 32), nn.ReLU(), nn.Linear(32, dim))

    def forward(self, x):
        return self.dec(self.enc(x))


class Discriminator(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


class OneClassTrainer:
    def __init__(self, dim=12, noise=0.3):
        self.g, self.d = Denoiser(dim), Discriminator(dim)
        self.g_optim = torch.optim.Adam(self.g.parameters(), lr=1e-3)
        self.d_optim = torch.optim.Adam(self.d.parameters(), lr=2e-4)
        self.noise = noise

    def step(self, x):
        valid, fake = torch.ones(x.size(0)), torch.zeros(x.size(0))
        output = self.g(x + self.noise * torch.randn_like(x))

        d_real = F.binary_cross_entropy_with_logits(self.d(x), valid)
        d_fake = F.binary_cross_entropy_with_logits(self.d(output.detach()), fake)
        d_loss = d_real + d_fake
        adv = F.binary_cross_entropy_with_logits(self.d(output), valid)

        self.d_optim.zero_grad()
        d_loss.backward()
        self.d_optim.step()

        g_loss = F.mse_loss(output, x) + 0.05 * adv
        self.g_optim.zero_grad()
        g_loss.backward()
        self.g_optim.step()
        return d_loss.item(), g_loss.item()


def normal_samples(n, basis):
    return torch.randn(n, basis.size(0)) @ basis


if __name__ == "__main__":
    basis = torch.randn(3, 12)
    trainer = OneClassTrainer()
    for it in range(300):
        d_loss, g_loss = trainer.step(normal_samples(64, basis))
        if it % 50 == 0 or it == 299:
            print(f"iter {it:3d}  d {d_loss:.4f}  g {g_loss:.4f}")
