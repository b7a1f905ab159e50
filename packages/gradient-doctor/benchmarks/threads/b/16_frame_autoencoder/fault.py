import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)
ACCUM, UPDATES = 4, 20


class ConvVAE(nn.Module):
    def __init__(self, z=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, 8 * 36), nn.ReLU(), nn.Unflatten(1, (8, 6, 6)),
                                 nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def frames(n):
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    cx, cy = torch.rand(2, n, 1, 1) * 8 + 2
    return torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / 6).unsqueeze(1)


def training_step(model, batch):
    recon, mu, logvar = model(batch)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
    return F.mse_loss(recon, batch) * 10 + 1e-3 * kl


def main():
    model = ConvVAE()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.zero_grad()
    running = 0.0
    for it in range(ACCUM * UPDATES):
        batch = frames(16)
        loss = training_step(model, batch) / ACCUM
        loss.backward()
        running += loss.item()
        if (it + 1) % ACCUM == 0:
            norm = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt()
            optimizer.step()
            if (it + 1) // ACCUM % 4 == 0:
                print(f"update {(it + 1) // ACCUM} loss {running:.4f} grad norm {norm.item():.4f}")
            running = 0.0
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
