import math

import torch
from torch import nn

torch.manual_seed(0)
NU = 0.05


class BurgersNet:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
        x = torch.rand(300, 1) * 2 - 1
        t = torch.rand(300, 1)
        self.X_inside = torch.cat([x, t], dim=1).requires_grad_(True)
        xb = torch.linspace(-1, 1, 60).unsqueeze(1)
        tb = torch.rand(40, 1)
        side = torch.sign(torch.randn(40, 1))
        self.X_boundary = torch.cat([torch.cat([xb, torch.zeros_like(xb)], 1), torch.cat([side, tb], 1)])
        self.y_boundary = torch.cat([-torch.sin(math.pi * xb), torch.zeros_like(tb)])
        self.criterion = nn.MSELoss()
        self.adam = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.iter = 0

    def residual(self):
        u = self.model(self.X_inside)
        du = torch.autograd.grad(u, self.X_inside, torch.ones_like(u), create_graph=True)[0]
        u_x, u_t = du[:, :1], du[:, 1:]
        u_xx = torch.autograd.grad(u_x, self.X_inside, torch.ones_like(u_x), create_graph=True)[0][:, :1]
        return u_t + u * u_x - NU * u_xx

    def loss_func(self):
        loss_data = self.criterion(self.model(self.X_boundary), self.y_boundary)
        res = self.residual()
        loss_pde = self.criterion(res, torch.zeros_like(res))
        loss = loss_data + loss_pde
        loss.backward()
        if self.iter % 50 == 0:
            print(f"iter {self.iter}  loss {loss.item():.5f}  data {loss_data.item():.5f}  pde {loss_pde.item():.5f}")
        self.iter += 1
        return loss

    def train(self, n_iter=401):
        self.model.train()
        for _ in range(n_iter):
            self.adam.step(self.loss_func)


BurgersNet().train()
