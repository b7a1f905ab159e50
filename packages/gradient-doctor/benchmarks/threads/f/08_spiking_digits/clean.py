import torch
import torch.nn as nn


class SpikeFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).float()

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return g / (1 + 10 * v.abs()) ** 2


class Leaky(nn.Module):
    """Leaky integrate and fire; the membrane potential lives in the layer."""

    def __init__(self, beta=0.9, threshold=1.0):
        super().__init__()
        self.beta, self.threshold = beta, threshold
        self.reset_mem()

    def reset_mem(self):
        self.mem = torch.zeros(1)

    def forward(self, current):
        spk_before = SpikeFn.apply(self.mem - self.threshold)
        self.mem = self.beta * self.mem + current - spk_before * self.threshold
        return SpikeFn.apply(self.mem - self.threshold)


class SNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.lif1 = Leaky()
        self.fc = nn.Linear(6 * 6 * 6, 4)
        self.lif2 = Leaky()

    def forward(self, x):
        return self.lif2(self.fc(self.lif1(self.conv(x)).flatten(1)))


def reset(net):
    for m in net.modules():
        if isinstance(m, Leaky):
            m.reset_mem()


def batch_of_bars(n=32):
    y = torch.randint(0, 4, (n,))
    x = 0.2 * torch.rand(n, 1, 8, 8)
    for i in range(n):
        x[i, 0, 2 * y[i]:2 * y[i] + 2] += 0.8
    return x, y


def forward_pass(net, num_steps, data):
    spk_rec = []
    reset(net)
    for _ in range(num_steps):
        spk_rec.append(net(data))
    return torch.stack(spk_rec)


torch.manual_seed(0)
net = SNN()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
for it in range(60):
    data, targets = batch_of_bars()
    net.train()
    rate = forward_pass(net, 15, data).mean(0)
    loss = nn.functional.cross_entropy(4 * rate, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 12 == 0 or it == 59:
        print(f"it {it} loss {loss.item():.3f} acc {(rate.argmax(1) == targets).float().mean():.2f}")
