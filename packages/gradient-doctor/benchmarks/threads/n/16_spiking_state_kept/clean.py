import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
T, N, CLASSES = 8, 32, 4


class ATan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x >= 0).float()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1 + (3.14 * x) ** 2)


class IFNode(nn.Module):
    def __init__(self, threshold=1.0):
        super().__init__()
        self.threshold = threshold
        self.v = 0.0

    def reset(self):
        self.v = 0.0

    def forward(self, current):
        self.v = self.v + current
        spike = ATan.apply(self.v - self.threshold)
        self.v = self.v - spike * self.threshold
        return spike


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 48), IFNode(), nn.Linear(48, CLASSES), IFNode())

    def forward(self, x_seq):
        return torch.stack([self.layers(x) for x in x_seq])


def reset_net(net):
    for module in net.modules():
        if isinstance(module, IFNode):
            module.reset()


def batch():
    target = torch.randint(0, CLASSES, (N,))
    rate = 0.15 + 0.6 * F.one_hot(target, CLASSES).float().repeat_interleave(5, 1)
    return (torch.rand(T, N, 20) < rate).float(), target


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
for iteration in range(101):
    x_seq, target = batch()
    optimizer.zero_grad()
    y = net(x_seq).mean(0)
    loss = F.cross_entropy(y, target)
    loss.backward()
    optimizer.step()
    reset_net(net)
    if iteration % 25 == 0:
        print(f"iteration {iteration:3d}  loss {loss.item():.3f}  accuracy {(y.argmax(1) == target).float().mean():.3f}")
