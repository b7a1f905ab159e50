import torch
import torch.nn as nn

EPS = 1e-8


class Masker(nn.Module):
    def __init__(self, bands=24):
        super().__init__()
        self.rnn = nn.GRU(bands, 32, batch_first=True)
        self.out = nn.Linear(32, bands)

    def forward(self, noisy):
        h, _ = self.rnn(torch.log1p(noisy))
        return torch.sigmoid(self.out(h)) * noisy


def segments(x, length=12):
    return x.unfold(1, length, length // 2)  # batch, segment, band, time


def normalise(x):
    x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


class NegIntelligibility(nn.Module):
    """Minus the mean correlation of short segments of the band envelopes."""

    def forward(self, estimate, clean):
        correlation = (normalise(segments(estimate)) * normalise(segments(clean))).sum(-1)
        return -correlation.mean()


def utterances(gen, n=12, frames=60, bands=24):
    t = torch.arange(frames) / frames
    pitch = 1 + 7 * torch.rand(n, 1, bands, generator=gen)
    clean = (1 + torch.sin(6.28 * pitch * t[None, :, None])).pow(2)
    noise = torch.randn(n, frames, bands, generator=gen).abs()
    noise[:, :, ::2] += 12 * (torch.rand(n, frames, 1, generator=gen) > 0.6)
    noisy = clean + noise
    quiet = int(torch.randint(0, 16, (1,), generator=gen))
    if quiet == 0:  # a file with digital silence at its end
        noisy[0, 40:] = 0.0
        clean[0, 40:] = 0.0
    return noisy, clean


def fit(model, loss_fn, steps=120):
    gen = torch.Generator().manual_seed(4)
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        noisy, clean = utterances(gen)
        loss = loss_fn(model(noisy), clean)
        optim.zero_grad()
        loss.backward()
        optim.step()
        if step % 15 == 0 or step == steps - 1:
            print(f"{step:3d} -stoi {loss.item():.4f}")


torch.manual_seed(0)
fit(Masker(), NegIntelligibility())
