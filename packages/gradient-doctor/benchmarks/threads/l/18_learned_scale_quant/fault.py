import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class RoundSte(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class RestrictedScale(nn.Module):
    def __init__(self, init, min_val):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(init))
        self.min_val = min_val

    def forward(self):
        return self.value.clamp_min(self.min_val)


class QuantReLU(nn.Module):
    def __init__(self, bit_width=4, scale_init=0.001, scaling_min_val=0.01):
        super().__init__()
        self.scaling_impl = RestrictedScale(scale_init, scaling_min_val)
        self.n_levels = 2 ** bit_width - 1

    def forward(self, x):
        scale = self.scaling_impl()
        levels = torch.clamp(x / scale, 0, self.n_levels)
        return RoundSte.apply(levels) * scale


class QuantNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 48)
        self.act1 = QuantReLU()
        self.fc2 = nn.Linear(48, 48)
        self.act2 = QuantReLU()
        self.out = nn.Linear(48, 1)

    def forward(self, x):
        return self.out(self.act2(self.fc2(self.act1(self.fc1(x)))))


def data(n):
    x = torch.rand(n, 8) * 2 - 1
    return x, (3 * x[:, :1] * x[:, 1:2] + torch.sin(3 * x[:, 2:3]))


net = QuantNet()
scales = [net.act1.scaling_impl, net.act2.scaling_impl]
weights = [p for n, p in net.named_parameters() if "scaling_impl" not in n]
opt = torch.optim.Adam([{"params": weights}, {"params": [s.value for s in scales], "lr": 1e-3}], lr=3e-3)
for step in range(1, 501):
    x, y = data(128)
    loss = F.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 100 == 0:
        used = " ".join(f"{s().item():.4f}" for s in scales)
        print(f"step {step}  loss {loss.item():.4f}  scales in use {used}")
