import torch
import torch.nn as nn

torch.manual_seed(31)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.LeakyReLU(0.2), nn.Flatten(),
                                 nn.Linear(8 * 64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)


class Painter(nn.Module):
    def __init__(self, z=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(z, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, z):
        return self.net(z).view(-1, 1, 8, 8)


def real_batch(n):
    img = 0.1 * torch.randn(n, 1, 8, 8)
    rows = torch.randint(0, 8, (n,))
    img[torch.arange(n), 0, rows] += 1.0
    return img


def gradient_penalty(critic, real, fake):
    eps = torch.rand(len(real), 1, 1, 1)
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    grads = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)[0]
    penalty = ((grads.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
    return 10.0 * penalty, grads.flatten(1).norm(dim=1).mean()


critic, painter = Critic(), Painter()
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_p = torch.optim.Adam(painter.parameters(), lr=1e-3, betas=(0.5, 0.9))

for it in range(81):
    for _ in range(3):
        real, fake = real_batch(32), painter(torch.randn(32, 8)).detach()
        gp, slope = gradient_penalty(critic, real, fake)
        loss_c = critic(fake).mean() - critic(real).mean() + gp
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
    loss_p = -critic(painter(torch.randn(32, 8))).mean()
    opt_p.zero_grad()
    loss_p.backward()
    opt_p.step()
    if it % 16 == 0:
        print(f"it {it:3d}  critic {loss_c.item():+.3f}  slope of the critic {slope.item():.3f}")
