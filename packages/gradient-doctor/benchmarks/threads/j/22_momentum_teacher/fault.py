import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


class PointNet(nn.Module):
    def __init__(self, cin=4, classes=3, width=32):
        super().__init__()
        self.block1 = nn.Sequential(nn.Linear(cin, width), nn.BatchNorm1d(width), nn.ReLU())
        self.block2 = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.block2(self.block1(x)))


class MomentumUpdater:
    def __init__(self, tau=0.98):
        self.tau = tau

    @torch.no_grad()
    def update(self, online_net, momentum_net):
        for op, mp in zip(online_net.parameters(), momentum_net.parameters()):
            mp.data.mul_(self.tau)
            mp.data.add_(op.data * (1 - self.tau))


def scan(n, target=False):
    y = torch.randint(0, 3, (n,))
    x = torch.randn(n, 4) * 2.0 + 12.0
    x[:, 0] += 6.0 * (y == 1)
    x[:, 1] -= 6.0 * (y == 2)
    if target:
        x = x * 1.1 + torch.tensor([0.0, 0.0, 4.0, -3.0])
    return x, y


def main(iters=250, threshold=0.8):
    torch.manual_seed(0)
    student = PointNet()
    teacher = copy.deepcopy(student).requires_grad_(False)
    teacher.eval()
    updater = MomentumUpdater()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    x_val, y_val = scan(1000, target=True)

    for it in range(1, iters + 1):
        student.train()
        xs, ys = scan(128)
        xt, _ = scan(128, target=True)
        loss = F.cross_entropy(student(xs), ys)
        if it > 100:
            prob, pseudo = teacher(xt).softmax(1).max(1)
            keep = prob > threshold
            if keep.any():
                loss = loss + F.cross_entropy(student(xt)[keep], pseudo[keep])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updater.update(student, teacher)

        if it % 50 == 0:
            student.eval()
            with torch.no_grad():
                s = (student(x_val).argmax(1) == y_val).float().mean().item()
                t = (teacher(x_val).argmax(1) == y_val).float().mean().item()
            print(f"it {it}  loss {loss.item():.3f}  student acc {s:.3f}  teacher acc {t:.3f}")


if __name__ == "__main__":
    main()
