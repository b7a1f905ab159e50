import torch
import torch.nn.functional as F
from torch import nn, optim

torch.manual_seed(0)
X, Z, MARGIN, ALPHA, BETA = 24, 4, 6.0, 0.25, 2.0


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(X, 64), nn.ReLU(), nn.Linear(64, 2 * Z))

    def forward(self, x):
        mu, logvar = self.net(x).chunk(2, dim=1)
        return mu, logvar.clamp(-6, 3)


class IntroVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.Sequential(nn.Linear(Z, 64), nn.ReLU(), nn.Linear(64, X))
        self.opt_e = optim.Adam(self.encoder.parameters(), lr=1e-3)
        self.opt_d = optim.Adam(self.decoder.parameters(), lr=1e-3)

    @staticmethod
    def kld(mu, logvar):
        return 0.5 * (mu ** 2 + logvar.exp() - logvar - 1).sum(1).mean()

    @staticmethod
    def reparam(mu, logvar):
        return mu + torch.randn_like(mu) * (0.5 * logvar).exp()

    def update(self, x):
        zp = torch.randn(len(x), Z)
        mu, logvar = self.encoder(x)
        z = self.reparam(mu, logvar)
        xr, xp = self.decoder(z), self.decoder(zp)
        kl_r = self.kld(*self.encoder(xr.detach()))
        kl_p = self.kld(*self.encoder(xp.detach()))
        loss_ae = F.mse_loss(xr, x, reduction="none").sum(1).mean()
        loss_e = self.kld(mu, logvar) + ALPHA * (F.relu(MARGIN - kl_r) + F.relu(MARGIN - kl_p)) + BETA * loss_ae
        self.opt_e.zero_grad()
        loss_e.backward()
        self.opt_e.step()

        mu, logvar = self.encoder(x)
        z = self.reparam(mu.detach(), logvar.detach())
        xr, xp = self.decoder(z), self.decoder(zp)
        kl_rr = self.kld(*self.encoder(xr))
        kl_pp = self.kld(*self.encoder(xp))
        loss_ae = F.mse_loss(xr, x, reduction="none").sum(1).mean()
        loss_d = ALPHA * (kl_rr + kl_pp) + BETA * loss_ae
        self.opt_d.zero_grad()
        loss_d.backward()
        self.opt_d.step()
        return loss_ae.item(), kl_rr.item(), kl_pp.item()


mix = torch.randn(2, X)


def data(n):
    angle = 6.2832 * torch.rand(n, 1)
    return torch.tanh(torch.cat([angle.cos(), angle.sin()], 1) @ mix) + 0.05 * torch.randn(n, X)


vae = IntroVAE()
for step in range(1, 401):
    ae, kl_rec, kl_gen = vae.update(data(64))
    if step % 80 == 0:
        print(f"step {step}  reconstruction {ae:.3f}  kl of reconstructions {kl_rec:.3f}  kl of samples {kl_gen:.3f}")
