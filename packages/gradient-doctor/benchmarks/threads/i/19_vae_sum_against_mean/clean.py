import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)


class ExpressionVAE(nn.Module):
    def __init__(self, genes=60, hidden=64, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(genes, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, genes))

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(z), mu, logvar


def vae_loss(x_hat, x, mu, logvar):
    recon = F.mse_loss(x_hat, x, reduction="sum") / x.size(0)
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
    return recon + kl, recon, kl


class CellChunks:
    def __init__(self, genes=60, programs=4):
        self.loadings = torch.randn(programs, genes)

    def __iter__(self):
        for _ in range(30):
            activity = torch.randn(128, self.loadings.size(0))
            yield activity @ self.loadings + 0.3 * torch.randn(128, self.loadings.size(1))


def train(epochs=10):
    chunks = CellChunks()
    model = ExpressionVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for epoch in range(epochs):
        per_gene = 0.0
        for x in chunks:
            x_hat, mu, logvar = model(x)
            loss, recon, kl = vae_loss(x_hat, x, mu, logvar)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            per_gene += F.mse_loss(x_hat.detach(), x).item() / 30
        print(f"epoch {epoch:2d}  loss {loss.item():9.4f}  kl {kl.item():9.4f}  mse per gene {per_gene:.4f}")


if __name__ == "__main__":
    train()
