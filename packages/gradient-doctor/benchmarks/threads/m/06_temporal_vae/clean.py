import torch
import torch.nn as nn

torch.manual_seed(0)


class EventVAE(nn.Module):
    def __init__(self, dim=6, latent=3, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(dim, hidden, batch_first=True)
        self.mean = nn.Linear(hidden, latent)
        self.log_var = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, dim))

    def forward(self, x):
        h, _ = self.rnn(x)
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        return self.decoder(z), mean, log_var


def vae_loss(recon, x, mean, log_var, mask):
    rec_loss = (recon - x).pow(2).sum(-1) * mask
    kl_loss = (-0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp(), dim=-1)) * mask
    n = mask.sum()
    return rec_loss.sum() / n, kl_loss.sum() / n


def make_batch(batch=32, max_len=20, dim=6):
    lens = torch.randint(5, max_len + 1, (batch,))
    mask = (torch.arange(max_len)[None] < lens[:, None]).float()
    base = torch.randn(batch, max_len, 2)
    mix = torch.linspace(-2, 2, 2 * dim).view(2, dim)
    return (base @ mix) * mask.unsqueeze(-1), mask


model = EventVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(200):
    x, mask = make_batch()
    recon, mean, log_var = model(x)
    rec, kl = vae_loss(recon, x, mean, log_var, mask)
    loss = rec + kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"step {step + 1}: rec {rec.item():.3f}  kl {kl.item():.4f}")
