import torch
import torch.nn as nn

torch.manual_seed(21)
SIZE, LAMBDA = 8, 10.0


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.LeakyReLU(0.2),
        )
        self.score = nn.Linear(16 * 16, 1, bias=False)

    def forward(self, x):
        return self.score(self.features(x).flatten(1))


class Generator(nn.Module):
    def __init__(self, z_dim=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(z_dim, 64), nn.ReLU(), nn.Linear(64, SIZE * SIZE), nn.Tanh())

    def forward(self, z):
        return self.net(z).view(-1, 1, SIZE, SIZE)


def real_images(n):
    column = torch.randint(0, SIZE - 1, (n,))
    x = -0.9 * torch.ones(n, 1, SIZE, SIZE)
    for i, c in enumerate(column.tolist()):
        x[i, :, :, c:c + 2] = 0.9
    return x


def gradient_penalty(critic, real, fake):
    eta = torch.rand(real.size(0), 1, 1, 1)
    mixed = (eta * real + (1 - eta) * fake).requires_grad_(True)
    scores = critic(mixed)
    gradients = torch.autograd.grad(scores.sum(), mixed, create_graph=True)[0]
    norms = gradients.flatten(1).norm(2, dim=1).detach()
    penalty = ((gradients.norm(2, dim=1) - 1) ** 2).mean() * LAMBDA
    return penalty, norms.mean()


critic, generator = Critic(), Generator()
d_opt = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
for it in range(100):
    for _ in range(3):
        real = real_images(32)
        fake = generator(torch.randn(32, 8)).detach()
        penalty, norm = gradient_penalty(critic, real, fake)
        d_loss = critic(fake).mean() - critic(real).mean() + penalty
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
    g_loss = -critic(generator(torch.randn(32, 8))).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
    if it % 20 == 0 or it == 99:
        print(f"{it:3d} critic {d_loss.item():9.3f}  penalty {penalty.item():.3f}  input gradient norm {norm.item():.3f}")
