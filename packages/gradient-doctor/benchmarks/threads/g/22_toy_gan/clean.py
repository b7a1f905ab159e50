import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(47)


def mlp(a, b):
    return nn.Sequential(nn.Linear(a, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, b))


class GAN:
    def __init__(self, z_dim=4, data_dim=2, lr=2e-2):
        self.z_dim = z_dim
        self.generator = mlp(z_dim, data_dim)
        self.discriminator = mlp(data_dim, 1)
        self.opt_g = torch.optim.SGD(self.generator.parameters(), lr=lr)
        self.opt_d = torch.optim.SGD(self.discriminator.parameters(), lr=lr)

    def bce(self, logits, value):
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))

    def step(self, real):
        fake = self.generator(torch.randn(len(real), self.z_dim))
        self.opt_d.zero_grad()
        err_d = self.bce(self.discriminator(real), 1.0) + self.bce(self.discriminator(fake.detach()), 0.0)
        err_d.backward()
        self.opt_d.step()

        self.opt_g.zero_grad()
        err_g = self.bce(self.discriminator(fake), 1.0)
        err_g.backward()
        self.opt_g.step()
        return err_d.item(), err_g.item()


def real_points(n):
    return torch.tensor([1.5, -1.0]) + 0.4 * torch.randn(n, 2)


gan = GAN()
for it in range(601):
    err_d, err_g = gan.step(real_points(64))
    if it % 100 == 0:
        with torch.no_grad():
            center = gan.generator(torch.randn(256, 4)).mean(0).tolist()
        size = torch.cat([p.grad.flatten() for p in gan.discriminator.parameters()]).norm().item()
        print(f"it {it:3d}  D {err_d:.3f}  G {err_g:.3f}  grad of D {size:.3f}  center {center[0]:+.2f} {center[1]:+.2f}")
