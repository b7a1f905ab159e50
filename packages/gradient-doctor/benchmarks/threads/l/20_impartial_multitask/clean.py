import itertools

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class IMTLLoss(nn.Module):
    """Learned scale s_t for every task: exp(s_t) * L_t - s_t."""

    def __init__(self, num_losses, init_value=0.0):
        super().__init__()
        self.s_t = nn.Parameter(torch.full((num_losses,), init_value))

    def forward(self, losses):
        losses = torch.stack(losses)
        scaled = self.s_t.exp() * losses - self.s_t
        return scaled.sum()


class MultiTaskNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.depth = nn.Linear(64, 1)
        self.normal = nn.Linear(64, 3)
        self.label = nn.Linear(64, 4)

    def forward(self, x):
        h = self.shared(x)
        return self.depth(h), self.normal(h), self.label(h)


proj = torch.randn(10, 8)


def batch(n=64):
    x = torch.randn(n, 10)
    f = torch.tanh(x @ proj)
    depth = 100.0 * f[:, :1]
    normal = 0.02 * f[:, 1:4]
    label = f[:, 4:8].argmax(1)
    return x, depth, normal, label


model, imtl = MultiTaskNet(), IMTLLoss(num_losses=3)
parameters = itertools.chain(model.parameters(), imtl.parameters())
optimizer = torch.optim.Adam(parameters, lr=3e-3)
for step in range(1, 601):
    x, depth, normal, label = batch()
    d, n, l = model(x)
    losses = [F.l1_loss(d, depth), F.l1_loss(n, normal), F.cross_entropy(l, label)]
    loss = imtl(losses)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        values = "  ".join(f"{v.item():8.4f}" for v in losses)
        scale = " ".join(f"{v:.3f}" for v in imtl.s_t.exp().tolist())
        print(f"step {step}  depth, normal, label {values}  task scales {scale}")
