import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def infonce(pos_dist, neg_dist):
    with torch.no_grad():
        c, _ = neg_dist.max(dim=1)
    pos_dist = pos_dist - c
    neg_dist = neg_dist - c
    align = (-pos_dist).mean()
    uniform = torch.logsumexp(neg_dist, dim=1).mean()
    return align + uniform, align, uniform


class Encoder(nn.Module):
    def __init__(self, neurons=20, dim=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(neurons, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x):
        return self.net(x)


class Recording:
    """Neural activity driven by a position on a track."""

    def __init__(self, neurons=20):
        self.tuning = torch.rand(neurons)

    def activity(self, position):
        rate = torch.exp(-((position[:, None] - self.tuning) / 0.15) ** 2)
        return rate + 0.15 * torch.randn_like(rate)

    def sample(self, n=24):
        position = torch.rand(n)
        near = (position + 0.02 * torch.randn(n)).clamp(0, 1)
        return self.activity(position), self.activity(near), self.activity(torch.rand(n))


def similarity(ref, pos, neg, temperature):
    return -(ref - pos).pow(2).sum(1) / temperature, -torch.cdist(ref, neg).pow(2) / temperature


def retrieval(model, recording):
    with torch.no_grad():
        ref, pos, _ = recording.sample(200)
        order = torch.cdist(model(ref), model(pos)).argsort(1)
    return (order[:, :10] == torch.arange(200)[:, None]).any(1).float().mean().item()


recording = Recording()
model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(401):
    ref, pos, neg = (model(x) for x in recording.sample())
    loss, align, uniform = infonce(*similarity(ref, pos, neg, temperature=0.01))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}  align {align.item():.3f}  top-10 {retrieval(model, recording):.3f}")
