import torch
import torch.nn as nn

torch.manual_seed(0)


class SentenceVAE(nn.Module):
    def __init__(self, vocab=12, width=24, latent=8, length=6):
        super().__init__()
        self.width, self.length, self.layers = width, length, 2
        self.embed = nn.Embedding(vocab, width)
        self.encoder = nn.GRU(width, width, num_layers=1, bidirectional=True, batch_first=True)
        self.mean = nn.Linear(width * self.layers, latent)
        self.logv = nn.Linear(width * self.layers, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, length * vocab)
        )

    def forward(self, tokens):
        batch = tokens.size(0)
        _, hidden = self.encoder(self.embed(tokens))
        hidden = torch.cat([hidden[0], hidden[1]], dim=1)
        mean, logv = self.mean(hidden), self.logv(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logv)
        return self.decoder(z).view(batch, self.length, -1), mean, logv


def sentences(n=64, vocab=12, length=6):
    first = torch.randint(0, vocab, (n, 1))
    return (first + torch.randint(1, 4, (n, 1)) * torch.arange(length)) % vocab


def train(steps=250):
    model = SentenceVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        tokens = sentences()
        logits, mean, logv = model(tokens)
        nll = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        kl = -0.5 * (1 + logv - mean.pow(2) - logv.exp()).sum(1).mean()
        loss = nll + 0.002 * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            right = (logits.argmax(-1) == tokens).float().mean().item()
            print(f"step {step:3d} nll {nll.item():.4f} kl {kl.item():.3f} right {right:.2f}")


train()
