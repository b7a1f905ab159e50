import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)


class ConvUnit(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, 3, padding=1)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.conv(x))


class Detector(nn.Module):
    def __init__(self, width=8, classes=3):
        super().__init__()
        self.stem = ConvUnit(1, width)
        self.body = ConvUnit(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, picture):
        return self.head(self.body(self.stem(picture)).amax((2, 3)))


def pictures(n=48, size=10):
    label = torch.randint(0, 3, (n,))
    picture = 0.2 * torch.randn(n, 1, size, size)
    for i, k in enumerate(label.tolist()):
        r, c = torch.randint(0, size - 4, (2,)).tolist()
        picture[i, 0, r : r + 2 + k, c : c + 4 - k] += 1.5
    return picture, label


def train(steps=60):
    model = DistributedDataParallel(Detector())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        picture, label = pictures()
        loss = nn.functional.cross_entropy(model(picture), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0 or step == steps - 1:
            print(f"step {step:2d} loss {loss.item():.4f}")


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    train()
finally:
    dist.destroy_process_group()
