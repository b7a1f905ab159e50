import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
IMG, NOISE, SPEC = 12, 4, 24


def make_pairs(n):
    img = torch.randn(n, IMG)
    mix = torch.linspace(-1, 1, IMG * SPEC).view(IMG, SPEC).sin()
    decay = torch.exp(-torch.arange(SPEC) / 8.0)
    room = torch.randn(n, 1)
    spec = torch.tanh(img @ mix * 0.2 + room * decay)
    return img, spec


class SpecGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(IMG + NOISE, 64), nn.ReLU(),
            nn.Linear(64, SPEC), nn.Tanh())

    def forward(self, feats):
        z = torch.randn(feats.size(0), NOISE)
        return self.net(torch.cat([feats, z], dim=1))


class SpecDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(SPEC + IMG, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, spec, feats):
        return self.net(torch.cat([spec, feats], dim=1))


class ReverbGAN:
    def __init__(self):
        self.g = SpecGenerator()
        self.d = SpecDiscriminator()
        self.opt_g = torch.optim.Adam(self.g.parameters(), lr=1e-3, betas=(0.5, 0.99))
        self.opt_d = torch.optim.Adam(self.d.parameters(), lr=1e-3, betas=(0.5, 0.99))

    def d_step(self, img, spec):
        fake = self.g(img).detach()
        real_score, fake_score = self.d(spec, img), self.d(fake, img)
        loss = 0.5 * (F.mse_loss(real_score, torch.ones_like(real_score))
                      + F.mse_loss(fake_score, torch.zeros_like(fake_score)))
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def g_step(self, img, spec):
        fake = self.g(img)
        score = self.d(fake.detach(), img)
        adv = F.mse_loss(score, torch.ones_like(score))
        rec = 0.01 * F.l1_loss(fake, spec)
        self.opt_g.zero_grad()
        (adv + rec).backward()
        self.opt_g.step()
        return adv.item(), rec.item()


gan = ReverbGAN()
for it in range(601):
    img, spec = make_pairs(64)
    ld = gan.d_step(img, spec)
    la, lr = gan.g_step(img, spec)
    if it % 200 == 0:
        with torch.no_grad():
            same = gan.g(img[:1].repeat(64, 1)).std(0).mean()
        print(f"it {it:4d}  d {ld:.3f}  g_adv {la:.3f}  g_rec {lr:.4f}  spread for one image {same:.3f}")
