import torch
import torch.nn as nn

torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self, n_features, n_latent):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(n_features, 64), nn.LeakyReLU())
        self.mu = nn.Linear(64, n_latent)
        self.logvar = nn.Linear(64, n_latent)

    def forward(self, x):
        h = self.shared(x)
        return self.mu(h), self.logvar(h)


class TabularVAE(nn.Module):
    def __init__(self, n_features, n_latent=6):
        super().__init__()
        self.encoder = Encoder(n_features, n_latent)
        self.decoder = nn.Sequential(nn.Linear(n_latent, 64), nn.LeakyReLU(), nn.Linear(64, n_features))

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + std * torch.randn_like(std)

    def forward(self, x):
        mu, logvar = self.encoder(x)
        z = self.reparameterize(mu, logvar)
        return self.decoder(z), mu, logvar

    def loss(self, x):
        reconstruction, mu, logvar = self(x)
        rec = torch.nn.functional.smooth_l1_loss(reconstruction, x)
        kld = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
        return rec + 0.01 * kld


def customers(n):
    age = torch.randint(18, 90, (n,)).float()
    income = torch.exp(6.6 + 0.5 * torch.randn(n))
    visits = torch.poisson(torch.full((n,), 4.0))
    balance = 0.3 * income - 4 * age + 10 * torch.randn(n)
    return torch.stack([age, income, visits, balance], dim=1)


table = customers(1024)
model = TabularVAE(table.size(1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-3)
for epoch in range(20):
    total = 0.0
    for rows in table[torch.randperm(len(table))].split(64):
        loss = model.loss(rows)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    if epoch % 3 == 1:
        print(f"epoch {epoch}  loss {total / 16:.3f}")
