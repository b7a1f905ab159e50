import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.LeakyReLU(0.2))


class ScaleGenerator(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.body = nn.Sequential(block(1, width), block(width, width))
        self.tail = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noise, prev):
        return prev + torch.tanh(self.tail(self.body(noise + prev)))


class PatchCritic(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.net = nn.Sequential(block(1, width), block(width, width), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, x):
        return self.net(x)


def make_image(size=16):
    grid = torch.linspace(-3, 3, size)
    return torch.sin(grid)[None, None, :, None] * torch.cos(2 * grid)[None, None, None, :]


def train_scale(real, prev, iterations=15, d_steps=3, g_steps=3, rec_weight=10.0):
    gen, critic = ScaleGenerator(), PatchCritic()
    opt_g = torch.optim.Adam(gen.parameters(), lr=5e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(critic.parameters(), lr=5e-4, betas=(0.5, 0.999))
    z_fixed = torch.randn_like(real) * 0.1

    for it in range(iterations):
        for _ in range(d_steps):
            opt_d.zero_grad()
            fake = gen(torch.randn_like(real) * 0.1, prev)
            loss_d = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake.detach())).mean()
            loss_d.backward()
            opt_d.step()

        for _ in range(g_steps):
            opt_g.zero_grad()
            fake = gen(torch.randn_like(real) * 0.1, prev)
            score = critic(fake)
            loss_adv = -score.mean()
            loss_adv.backward(retain_graph=True)
            loss_rec = rec_weight * F.mse_loss(gen(z_fixed, prev), real)
            loss_rec.backward()
            opt_g.step()

        if it % 5 == 0 or it == iterations - 1:
            print(f"iter {it:2d}  D {loss_d.item():.3f}  adv {loss_adv.item():.3f}  rec {loss_rec.item():.3f}")


image = make_image()
coarse = F.interpolate(F.avg_pool2d(image, 4), scale_factor=4, mode="nearest")
train_scale(image, coarse)
