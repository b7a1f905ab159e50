import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
PIX, LATENT = 64, 4


def digits(n):
    """8x8 pictures of one soft blob at a random place."""
    c = torch.rand(n, 2, 1, 1) * 6 + 0.5
    g = torch.arange(8).float()
    yy, xx = torch.meshgrid(g, g, indexing="ij")
    d = (yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2
    return torch.exp(-d / 3.0).flatten(1)


class VAE(nn.Module):
    def __init__(self, kl_coeff=0.1, lr=2e-3):
        super().__init__()
        self.kl_coeff = kl_coeff
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(PIX, 64), nn.ReLU())
        self.fc_mu = nn.Linear(64, LATENT)
        self.fc_var = nn.Linear(64, LATENT)
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, PIX), nn.Sigmoid())

    def run_step(self, x):
        h = self.encoder(x)
        mu, log_var = self.fc_mu(h), self.fc_var(h)
        z = mu + torch.exp(0.5 * log_var) * torch.randn_like(mu)
        return self.decoder(z), mu, log_var

    def loss(self, x):
        x_hat, mu, log_var = self.run_step(x)
        recon = F.mse_loss(x_hat, x)
        kl = -0.5 * (1 + log_var - mu ** 2 - log_var.exp()).sum(1).mean()
        loss = self.kl_coeff * kl + recon
        return loss, {"recon": recon.item(), "kl": kl.item(), "loss": loss.item()}

    def configure_optimizer(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def fit(model, steps=1001):
    opt = model.configure_optimizer()
    for step in range(steps):
        loss, logs = model.loss(digits(128))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 200 == 0:
            print(step, {k: round(v, 4) for k, v in logs.items()})


fit(VAE(kl_coeff=0.001))
