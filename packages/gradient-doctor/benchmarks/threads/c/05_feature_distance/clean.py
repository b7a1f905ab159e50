import torch
import torch.nn as nn

torch.manual_seed(0)


def normalize_tensor(feat, eps=1e-10):
    factor = torch.sqrt(torch.sum(feat**2, dim=1, keepdim=True) + eps)
    return feat / (factor + eps)


class FeatureDistance(nn.Module):
    """Distance of two pictures in the features of a fixed network."""

    def __init__(self, channels=(4, 6)):
        super().__init__()
        sizes = (1, *channels)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU())
            for a, b in zip(sizes, sizes[1:])
        )
        self.requires_grad_(False)

    def forward(self, x, y):
        total = 0.0
        for stage in self.stages:
            x, y = stage(x), stage(y)
            gap = normalize_tensor(x) - normalize_tensor(y)
            total = total + gap.pow(2).sum(1).mean()
        return total


class Decoder(nn.Module):
    def __init__(self, code=8, size=10):
        super().__init__()
        self.size = size
        self.net = nn.Sequential(
            nn.Linear(code, 64), nn.ReLU(), nn.Linear(64, size * size)
        )

    def forward(self, z):
        return self.net(z).view(-1, 1, self.size, self.size)


def train(steps=60):
    decoder, distance = Decoder(), FeatureDistance()
    codes = torch.randn(32, 8)
    pictures = torch.tanh(codes @ torch.randn(8, 100)).view(32, 1, 10, 10)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=0.005)
    for step in range(steps):
        out = decoder(codes)
        loss = distance(out, pictures) + 0.1 * (out - pictures).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:2d} loss {loss.item():.4f}")


train()
