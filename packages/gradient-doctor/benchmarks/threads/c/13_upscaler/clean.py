import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR

torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.PReLU(), nn.Conv2d(width, 4, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def forward(self, low):
        return self.net(low)


class Discriminator(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten(),
            nn.Linear(width * 16, 1),
        )

    def forward(self, picture):
        return self.net(picture)


def pictures(n, size=8):
    grid = torch.linspace(-1, 1, size)
    a, b, c = torch.randn(3, n, 1, 1, 1)
    high = torch.sin(3 * (a * grid[:, None] + b * grid[None, :]) + c)
    return nn.functional.avg_pool2d(high, 2), high


def train(epochs=8, batches=20):
    net_g, net_d = Generator(), Discriminator()
    adversarial, content = nn.BCEWithLogitsLoss(), nn.MSELoss()
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=5e-3)
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=5e-3)
    scheduler_g = StepLR(optimizer_g, step_size=epochs // 2, gamma=0.1)
    scheduler_d = StepLR(optimizer_d, step_size=epochs // 2, gamma=0.1)
    real_label, fake_label = torch.ones(32, 1), torch.zeros(32, 1)
    for epoch in range(epochs):
        for _ in range(batches):
            low, high = pictures(32)
            fake = net_g(low)

            loss_d = adversarial(net_d(high), real_label)
            loss_d = loss_d + adversarial(net_d(fake.detach()), fake_label)
            optimizer_d.zero_grad()
            loss_d.backward()
            optimizer_d.step()

            loss_g = content(fake, high) + 1e-3 * adversarial(net_d(fake), real_label)
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
        scheduler_d.step()
        scheduler_g.step()
        rate = optimizer_g.param_groups[0]["lr"]
        print(f"epoch {epoch} loss_g {loss_g.item():.4f} loss_d {loss_d.item():.4f} lr {rate:.1e}")


train()
