import copy

import torch
import torch.nn as nn

torch.manual_seed(0)


class SmallUNet(nn.Module):
    def __init__(self, width=8, classes=2):
        super().__init__()
        self.inc = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.outc = nn.Conv2d(width, classes, 1)

    def features(self, x):
        return self.mid(self.inc(x))

    def forward(self, x):
        return self.outc(self.features(x))


def scans(n=32, size=10, shift=0.0, gain=1.0):
    label = torch.zeros(n, size, size, dtype=torch.long)
    for i in range(n):
        r, c = torch.randint(0, size - 4, (2,)).tolist()
        label[i, r : r + 4, c : c + 4] = 1
    picture = gain * label[:, None].float() + shift + 0.2 * torch.randn(n, 1, size, size)
    return picture, label


def train_source(steps=40):
    model = SmallUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        picture, label = scans()
        loss = nn.functional.cross_entropy(model(picture), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


class FeatureAlignment:
    """Moves target features to the prototypes, the last layer of the source."""

    def __init__(self, source, lr=0.01):
        self.model = copy.deepcopy(source)
        self.model.outc.requires_grad = False
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def step(self, picture):
        prob = self.model(picture).softmax(1)
        entropy = -(prob * (prob + 1e-6).log()).sum(1).mean()
        balance = (prob[:, 1].mean() - 0.16).pow(2)
        loss = entropy + 10 * balance
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main(steps=40):
    source = train_source()
    adaptation = FeatureAlignment(source)
    for step in range(steps):
        picture, label = scans(shift=0.3, gain=0.8)
        loss = adaptation.step(picture)
        if step % 10 == 0 or step == steps - 1:
            drift = (adaptation.model.outc.weight - source.outc.weight).abs().max().item()
            right = (adaptation.model(picture).argmax(1) == label).float().mean().item()
            print(f"step {step:2d} loss {loss:.4f} accuracy {right:.3f} outc moved {drift:.4f}")


main()
