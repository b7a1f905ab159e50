import torch
import torch.nn as nn

torch.manual_seed(53)


class GradientStepDenoiser(nn.Module):
    """Denoises by one step down an energy that a small network defines."""

    def __init__(self, n=16):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(n, 32), nn.Softplus(), nn.Linear(32, 1))

    def potential_grad(self, x):
        torch.set_grad_enabled(True)
        x = x.detach().requires_grad_(True)
        grad, = torch.autograd.grad(self.energy(x).sum(), x)
        torch.set_grad_enabled(False)
        return grad

    def forward(self, x, sigma):
        return x - sigma * self.potential_grad(x)


class Reconstructor(nn.Module):
    def __init__(self, n=16, m=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(m, 64), nn.ReLU(), nn.Linear(64, n))

    def forward(self, y):
        return self.net(y)


prior = GradientStepDenoiser().requires_grad_(False)
operator = torch.randn(16, 8) / 4
model = Reconstructor()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

basis = torch.randn(5, 16)
for step in range(200):
    signal = torch.randn(64, 5) @ basis
    noisy = signal + 0.1 * torch.randn_like(signal)
    measured = prior(noisy, 0.1) @ operator
    loss = (model(measured) - signal).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0 or step == 199:
        print(f"step {step:3d}  loss {loss.item():.4f}")
