import torch
import torch.nn as nn
import torch.nn.functional as F


class LookSAM:
    """Sharpness-aware steps every k iterations, cheap ones in between."""

    def __init__(self, params, lr=0.05, k=5, rho=0.05, alpha=0.5):
        self.params, self.k, self.rho, self.alpha = list(params), k, rho, alpha
        self.base = torch.optim.SGD(self.params, lr=lr, momentum=0.9)
        self.side, self.t = {}, 0

    @staticmethod
    def direction(g):
        return g / g.norm(p=2)

    def step(self, closure):
        loss = closure()
        grads = [p.grad.clone() for p in self.params]
        if self.t % self.k == 0:
            with torch.no_grad():
                shifts = [self.rho * self.direction(g) for g in grads]
                for p, e in zip(self.params, shifts):
                    p.add_(e)
            closure()
            with torch.no_grad():
                for i, (p, e) in enumerate(zip(self.params, shifts)):
                    p.sub_(e)
                    unit = self.direction(grads[i])
                    self.side[i] = p.grad - (p.grad * unit).sum() * unit
        else:
            for i, p in enumerate(self.params):
                p.grad.add_(self.alpha * self.side[i])
        self.base.step()
        self.t += 1
        return loss


class ResidualBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return x + self.scale * torch.relu(self.fc(x))


torch.manual_seed(0)
x = torch.randn(256, 10)
y = (x[:, 0] * x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), ResidualBlock(32), nn.Linear(32, 2))
optimizer = LookSAM(model.parameters())


def closure():
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


for i in range(101):
    loss = optimizer.step(closure)
    if i % 20 == 0:
        print(f"iteration {i:3d}  loss {loss.item():.4f}")
