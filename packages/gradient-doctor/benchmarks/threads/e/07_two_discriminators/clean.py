import math
import torch
from torch import nn
from torch.nn.functional import leaky_relu

torch.manual_seed(4)
LENGTH = 64


class PeriodDisc(nn.Module):
    def __init__(self, periods=(2, 4)):
        super().__init__()
        self.periods = periods
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Conv2d(1, 8, (5, 1), 2), nn.LeakyReLU(0.1), nn.Conv2d(8, 1, (3, 1))) for _ in periods
        )

    def forward(self, wav):
        return [net(wav.view(len(wav), 1, -1, p)).flatten(1) for p, net in zip(self.periods, self.nets)]


class SpectralDisc(nn.Module):
    def __init__(self, ffts=(16, 32)):
        super().__init__()
        self.ffts = ffts
        self.nets = nn.ModuleList(nn.ModuleList([nn.Linear(n // 2 + 1, 16), nn.Linear(16, 1)]) for n in ffts)

    def forward(self, wav):
        out = []
        for n, (a, b) in zip(self.ffts, self.nets):
            spec = torch.stft(wav, n, n // 2, window=torch.hann_window(n), return_complex=True).abs()
            out.append(b(leaky_relu(a(spec.transpose(1, 2)), 0.1)).flatten(1))
        return out


class Enhancer(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Sequential(
            nn.Conv1d(1, 12, 9, padding=4), nn.Tanh(), nn.Conv1d(12, 12, 9, padding=4), nn.Tanh(),
            nn.Conv1d(12, 1, 9, padding=4),
        )
        self.loss_mpd = PeriodDisc()
        self.loss_mrd = SpectralDisc()

    def forward(self, noisy):
        return self.score(noisy.unsqueeze(1)).squeeze(1)

    def configure_optimizers(self, lr=2e-3):
        params_disc = list(self.loss_mrd.parameters()) + list(self.loss_mpd.parameters())
        gen = torch.optim.Adam(self.score.parameters(), lr=lr, betas=(0.8, 0.99))
        disc = torch.optim.Adam(params_disc, lr=lr, betas=(0.8, 0.99))
        return gen, disc


def mix(n=24):
    t = torch.arange(LENGTH) / LENGTH
    clean = torch.sin(2 * math.pi * (torch.rand(n, 1) + (2 + 6 * torch.rand(n, 1)) * t))
    return clean, clean + 0.5 * torch.randn(n, LENGTH)


def lsgan(scores, goal):
    return sum((s - goal).square().mean() for s in scores) / len(scores)


system = Enhancer()
opt_gen, opt_disc = system.configure_optimizers()
for step in range(151):
    clean, noisy = mix()
    fake = system(noisy)

    d_mpd = lsgan(system.loss_mpd(clean), 1.0) + lsgan(system.loss_mpd(fake.detach()), 0.0)
    d_mrd = lsgan(system.loss_mrd(clean), 1.0) + lsgan(system.loss_mrd(fake.detach()), 0.0)
    opt_disc.zero_grad()
    (d_mpd + d_mrd).backward()
    opt_disc.step()

    adv = lsgan(system.loss_mpd(fake), 1.0) + lsgan(system.loss_mrd(fake), 1.0)
    l1 = (fake - clean).abs().mean()
    opt_gen.zero_grad()
    (5.0 * l1 + adv).backward()
    opt_gen.step()
    if step % 30 == 0:
        print(f"{step:3d} mpd {d_mpd.item():.3f} mrd {d_mrd.item():.3f} l1 {l1.item():.3f}")
