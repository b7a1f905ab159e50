import torch
import torch.nn as nn

torch.manual_seed(0)


class TransformerCoupling(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.half = channels // 2
        self.pre = nn.Conv1d(self.half, hidden, 1)
        self.transformer = nn.TransformerEncoderLayer(hidden, 2, 2 * hidden, dropout=0.0, batch_first=True)
        self.enc = nn.Conv1d(hidden, hidden, 5, padding=2)
        self.post = nn.Conv1d(hidden, self.half, 1)
        nn.init.zeros_(self.post.weight)
        nn.init.zeros_(self.post.bias)

    def forward(self, x):
        x0, x1 = torch.split(x, [self.half] * 2, dim=1)
        h = self.pre(x0)
        h = h + self.transformer(h.transpose(1, 2)).transpose(1, 2)
        m = self.post(torch.tanh(self.enc(h)))
        logs = torch.zeros_like(m)
        x1 = m + x1 * torch.exp(logs)
        x_ = torch.cat([x0, x1], dim=1)
        return x, logs.sum(dim=(1, 2))


class Flow(nn.Module):
    def __init__(self, channels=8, hidden=16, n_flows=2):
        super().__init__()
        self.layers = nn.ModuleList([TransformerCoupling(channels, hidden) for _ in range(n_flows)])

    def forward(self, x):
        total = 0.0
        for layer in self.layers:
            x, logdet = layer(x)
            total = total + logdet
            x = x.flip(1)
        return x, total


def latent_batch(batch=8, frames=16):
    phones = torch.randint(0, 10, (batch, frames))
    base = torch.randn(batch, 4, frames) + 0.2 * phones.unsqueeze(1)
    twist = 2 * torch.sin(2 * base) + 0.3 * torch.randn(batch, 4, frames)
    return phones, torch.cat([base, twist], dim=1)


flow, text_prior = Flow(), nn.Embedding(10, 8)
optimizer = torch.optim.Adam([*flow.parameters(), *text_prior.parameters()], lr=3e-3)
for step in range(150):
    phones, z = latent_batch()
    z_p, logdet = flow(z)
    m_p = text_prior(phones).transpose(1, 2)
    energy = 0.5 * (z_p - m_p).pow(2).sum(dim=(1, 2))
    loss = ((energy - logdet) / z[0].numel()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 29:
        print(f"step {step + 1}: kl {loss.item():.4f}")
