import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Tokenizer(nn.Module):
    def __init__(self, dim=24, latent=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, latent))
        self.dec = nn.Sequential(nn.Linear(latent, 48), nn.GELU(), nn.Linear(48, dim))

    def forward(self, x):
        return self.dec(self.enc(x))


class Trainer:
    def __init__(self, accumulate=4, disc_weight=1.0):
        self.model = Tokenizer()
        self.disc = nn.Sequential(nn.Linear(24, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
        self.opt_g = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.opt_d = torch.optim.Adam(self.disc.parameters(), lr=1e-3)
        self.accumulate, self.disc_weight = accumulate, disc_weight

    def generator_loss(self, x):
        recon = self.model(x)
        adv = -self.disc(recon).mean()
        return F.l1_loss(recon, x) + self.disc_weight * adv

    def discriminator_loss(self, x):
        with torch.no_grad():
            recon = self.model(x)
        return F.relu(1 - self.disc(x)).mean() + F.relu(1 + self.disc(recon)).mean()

    def training_step(self, x, index):
        g_loss = self.generator_loss(x)
        (g_loss / self.accumulate).backward()
        d_loss = self.discriminator_loss(x)
        (d_loss / self.accumulate).backward()
        if (index + 1) % self.accumulate == 0:
            for opt in (self.opt_g, self.opt_d):
                opt.step()
                opt.zero_grad()
        return g_loss.item(), d_loss.item()


basis = torch.randn(10, 24)
trainer = Trainer()
for i in range(800):
    clip = torch.tanh(torch.randn(16, 10) @ basis)
    g_loss, d_loss = trainer.training_step(clip, i)
    if i % 160 == 159:
        with torch.no_grad():
            real, recon = trainer.disc(clip).mean(), trainer.disc(trainer.model(clip)).mean()
        print(f"micro step {i + 1}: G {g_loss:.3f}  D {d_loss:.3f}  D(real) {real:.2f}  D(recon) {recon:.2f}")
