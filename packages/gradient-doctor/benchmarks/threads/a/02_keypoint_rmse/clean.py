import torch
import torch.nn as nn

torch.manual_seed(1)


class OffsetNet(nn.Module):
    """Predicts the 2-D displacement of a keypoint from its descriptor."""

    def __init__(self, d=12, hidden=32):
        super().__init__()
        self.l1 = nn.Linear(d, hidden, bias=False)
        self.l2 = nn.Linear(hidden, 2, bias=False)

    def forward(self, desc):
        return self.l2(torch.tanh(self.l1(desc)))


class PointDistance(nn.Module):
    def forward(self, pred, target):
        sq = (pred - target).pow(2).sum(dim=-1)
        return torch.sqrt(sq + 1e-8).mean()


def make_data(n=40, k=6, d=12):
    desc = torch.randn(n, k, d)
    mix = torch.randn(d, 2) * 0.3
    offset = desc @ mix
    absent = torch.rand(n, k) < 0.2
    desc[absent] = 0.0
    offset[absent] = 0.0
    return desc, offset


def main():
    desc, offset = make_data()
    net = OffsetNet()
    criterion = PointDistance()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(20):
        pred = net(desc)
        loss = criterion(pred, offset)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step:2d}  mean distance {loss.item():.4f}")
    print("final distance", criterion(net(desc), offset).item())


main()
