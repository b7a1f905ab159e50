import torch
import torch.nn as nn

torch.manual_seed(0)


class KeypointAttention(nn.Module):
    """Weights features by a map of how salient each place is."""

    def __init__(self, channels=6, polish=True):
        super().__init__()
        self.polish = polish
        self.features = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ELU())
        self.salience = nn.Sequential(nn.Conv2d(channels, 1, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(channels, 4)

    def forward(self, picture):
        feats = self.features(picture)
        att = self.salience(feats)
        if self.polish:
            att = att.clone()
            att[:, :, :, 0] = 0
            att[:, :, :, -1] = 0
            att[:, :, 0, :] = 0
            att[:, :, -1, :] = 0
        return self.head((feats * att).mean((2, 3)))


def views(n, size=12):
    label = torch.randint(0, 4, (n,))
    picture = 0.1 * torch.randn(n, 1, size, size)
    stripes = torch.arange(size)
    for i, k in enumerate(label.tolist()):
        wave = torch.cos(stripes * (0.8 + 0.7 * k))
        picture[i, 0, 2:-2] += wave if k % 2 else wave.abs()
    return picture, label


def train(steps=80):
    model = KeypointAttention()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(steps):
        picture, label = views(64)
        logits = model(picture)
        loss = nn.functional.cross_entropy(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            acc = (logits.argmax(1) == label).float().mean().item()
            print(f"step {step:2d} loss {loss.item():.3f} accuracy {acc:.2f}")


train()
