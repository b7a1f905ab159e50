import torch
import torch.nn as nn

torch.manual_seed(0)


class MaskNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Upsample(scale_factor=2),
        )
        self.out = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x):
        d1 = self.down(x)
        d1 = self.out(torch.cat([d1, self.deep(d1)], 1))
        return torch.sigmoid(d1)


def scans(n=32, size=16):
    picture = 0.3 * torch.randn(n, 1, size, size)
    mask = torch.zeros(n, 1, size, size)
    for i in range(n):
        r, c = torch.randint(0, size - 4, (2,)).tolist()
        mask[i, 0, r : r + 4, c : c + 4] = 1.0
    return picture + mask, mask


def train(steps=100):
    net = MaskNet()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=0.003, momentum=0.5)
    for step in range(steps):
        picture, mask = scans()
        pred = net(picture)
        loss = criterion(pred, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d} bce {loss.item():.4f}")


train()
