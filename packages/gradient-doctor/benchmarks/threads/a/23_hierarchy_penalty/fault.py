import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)

PARENT = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])


class TwoLevel(nn.Module):
    def __init__(self, d=10, hidden=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, hidden), nn.ReLU())
        self.level1 = nn.Linear(hidden, 3)
        self.level2 = nn.Linear(hidden, 8)

    def forward(self, x):
        h = self.trunk(x)
        return self.level1(h), self.level2(h)


def dependency_loss(out1, out2):
    pred1 = out1.argmax(dim=1)
    pred2 = out2.argmax(dim=1)
    mismatch = (PARENT[pred2] != pred1).float()
    return torch.exp(mismatch).mean() - 1.0


def items(n=160, d=10):
    fine = torch.randint(0, 8, (n,))
    protos = torch.randn(8, d)
    x = protos[fine] + 1.5 * torch.randn(n, d)
    coarse = PARENT[fine].clone()
    noisy = torch.rand(n) < 0.4
    coarse[noisy] = torch.randint(0, 3, (int(noisy.sum()),))
    return x, coarse, fine


def train(beta=5.0, steps=30):
    x, coarse, fine = items()
    net = TwoLevel()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for step in range(steps):
        out1, out2 = net(x)
        lloss = F.cross_entropy(out1, coarse) + F.cross_entropy(out2, fine)
        dloss = dependency_loss(out1, out2)
        loss = lloss + beta * dloss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == steps - 1:
            broken = (PARENT[out2.argmax(1)] != out1.argmax(1)).float().mean().item()
            print(f"step {step:2d} layer {lloss.item():.3f} dependency {dloss.item():.3f} broken {broken:.2f}")


train()
