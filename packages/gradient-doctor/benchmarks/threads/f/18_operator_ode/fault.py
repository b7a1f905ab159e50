import math
import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class DeepONet(nn.Module):
    """u(x; f): branch on the sampled source f, trunk on the place x."""

    def __init__(self, sensors=20, p=24):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(sensors, 40), nn.Tanh(), nn.Linear(40, p))
        self.trunk = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, p))

    def forward(self, f, x):
        return self.branch(f) @ self.trunk(x).T  # functions, places


def du_dx(u_row, x):
    return torch.autograd.grad(u_row.sum(), x, create_graph=True)[0].squeeze(-1)


class PDEOperator:
    """u' = f with u(0) = 0; one residual for each function of the batch."""

    def __init__(self, n_points=30, n_sensors=20):
        self.x = torch.linspace(0, 1, n_points)[:, None].requires_grad_()
        self.sensors = torch.linspace(0, 1, n_sensors)

    def draw(self, n):
        a, b = torch.randn(n, 1), torch.randn(n, 1)
        f = lambda x: a + b * torch.cos(math.pi * x)
        u = lambda x: a * x + b * torch.sin(math.pi * x) / math.pi
        return f, u

    def losses(self, net, f):
        u = net(f(self.sensors), self.x)
        place = self.x.detach().squeeze(-1)
        res = [(du_dx(row, self.x) - rhs).pow(2).mean() for row, rhs in zip(u, f(place))]
        bc = [row[0].pow(2) for row in u]
        return torch.as_tensor(res), torch.as_tensor(bc)


def train(iterations=250):
    data, net = PDEOperator(), DeepONet()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for it in range(iterations):
        f, u_true = data.draw(6)
        opt.zero_grad()
        loss_pde, loss_bc = data.losses(net, f)
        loss = loss_pde.mean() + 10 * loss_bc.mean()
        loss.backward()
        opt.step()
        if it % 50 == 49:
            x = data.x.detach()
            err = (net(f(data.sensors), x) - u_true(x.squeeze(-1))).abs().mean().item()
            print(f"{it + 1:4d} loss {loss.item():.3e} error of u {err:.4f}")


if __name__ == "__main__":
    train()
