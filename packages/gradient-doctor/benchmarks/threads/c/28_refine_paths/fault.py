import torch
import torch.nn as nn

torch.manual_seed(0)


class ResidualConvUnit(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(torch.relu(self.conv1(torch.relu(x))))


class RefineBlock(nn.Module):
    def __init__(self, width, n_paths=2):
        super().__init__()
        for i in range(n_paths):
            self.add_module(f"rcu{i}", ResidualConvUnit(width))
        self.fuse = nn.Conv2d(width, width, 1)

    def forward(self, *xs):
        for i, x in enumerate(xs):
            x = self.__getattr__(f"rcu{i}")(x)
        size = xs[0].shape[-2:]
        out = sum(nn.functional.interpolate(x, size) for x in xs)
        return self.fuse(out)


class DepthNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.high = nn.Conv2d(1, width, 3, padding=1)
        self.low = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.refine = RefineBlock(width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        return self.out(self.refine(self.high(x), self.low(x)))


def scenes(n=32, size=8):
    x = torch.randn(n, 1, size, size)
    smooth = nn.functional.avg_pool2d(x, 3, stride=1, padding=1)
    return x, smooth.abs() + 0.3 * x.pow(2)


def train(steps=100):
    net = DepthNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(steps):
        x, depth = scenes()
        loss = nn.functional.mse_loss(net(x), depth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            missing = sum(p.grad is None for p in net.parameters())
            print(f"step {step:3d} loss {loss.item():.4f} parameters without gradient {missing}")


train()
