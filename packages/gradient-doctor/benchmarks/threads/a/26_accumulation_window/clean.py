import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class FrameAutoencoder(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.SiLU(),
                                 nn.Conv2d(channels, 4, 3, padding=1))
        self.dec = nn.Sequential(nn.Conv2d(4, channels, 3, padding=1), nn.SiLU(),
                                 nn.Upsample(scale_factor=2),
                                 nn.Conv2d(channels, 1, 3, padding=1))

    def forward(self, x):
        return self.dec(self.enc(x))


def frames(n=4, size=16):
    grid = torch.linspace(-1, 1, size)
    cx, cy = torch.rand(n, 1, 1, 1) - 0.5, torch.rand(n, 1, 1, 1) - 0.5
    d2 = (grid.view(1, 1, 1, -1) - cx) ** 2 + (grid.view(1, 1, -1, 1) - cy) ** 2
    return torch.exp(-4 * d2)


def train(micro_batches=96, accumulate=8):
    model = FrameAutoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    window = 0.0
    optimizer.zero_grad()
    for i in range(micro_batches):
        x = frames()
        loss = F.mse_loss(model(x), x) / accumulate
        loss.backward()
        window += loss.item()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            print(f"update {(i + 1) // accumulate:2d} loss {window:.5f}")
            window = 0.0
            optimizer.zero_grad()


train()
