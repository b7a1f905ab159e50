import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class VAE(nn.Module):
    def __init__(self, d=20, hidden=64, z=4):
        super().__init__()
        self.fc1 = nn.Linear(d, hidden)
        self.fc_mu = nn.Linear(hidden, z)
        self.fc_logvar = nn.Linear(hidden, z)
        self.fc3 = nn.Linear(z, hidden)
        self.fc4 = nn.Linear(hidden, d)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.fc_mu(h), self.fc_logvar(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + std * torch.randn_like(std)

    def decode(self, z):
        return self.fc4(F.relu(self.fc3(z)))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon, x, mu, logvar):
    mse = F.mse_loss(recon, x)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.numel()
    return mse, kld


def main():
    factors = torch.randn(512, 2)
    data = factors @ torch.randn(2, 20) * 1.5
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(30):
        x = data[torch.randint(0, 512, (128,))]
        recon, mu, logvar = model(x)
        mse, kld = loss_function(recon, x, mu, logvar)
        loss = mse + kld
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == 29:
            print(f"step {step:2d} mse {mse.item():.3f} kl {kld.item():.4f} spread of mu {mu.std().item():.4f}")


main()
