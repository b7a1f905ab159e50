import torch
import torch.nn as nn

torch.manual_seed(0)


class ConvUnit(nn.Module):
    def __init__(self, i, o, k):
        super().__init__()
        self.conv = nn.Conv2d(i, o, k, padding=k // 2, bias=False)
        self.bn = nn.BatchNorm2d(o)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.block = nn.Sequential(
            ConvUnit(channels, channels // 2, 1),
            ConvUnit(channels // 2, channels, 3))

    def forward(self, x):
        residual = x
        out = self.block(x)
        out += residual
        return out


class Backbone(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.stem = ConvUnit(3, 16, 3)
        self.stage = nn.Sequential(ResidualBlock(16), ResidualBlock(16))
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(self.stage(self.stem(x)).mean(dim=(2, 3)))


def images(n=32):
    y = torch.randint(0, 4, (n,))
    tint = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1.0]])[y]
    return torch.randn(n, 3, 10, 10) + tint[:, :, None, None], y


net = Backbone()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(15):
    x, y = images()
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d} loss {loss.item():.4f}")
