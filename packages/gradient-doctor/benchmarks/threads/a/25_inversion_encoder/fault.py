import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)

DIM, Z = 16, 6


def build(i, o):
    return nn.Sequential(nn.Linear(i, 32), nn.LeakyReLU(0.2), nn.Linear(32, o))


def grad_norm(module):
    return sum(p.grad.pow(2).sum() for p in module.parameters() if p.grad is not None).sqrt().item()


class Inverter:
    def __init__(self):
        self.generator = nn.Linear(Z, DIM).requires_grad_(False)
        self.encoder = build(DIM, Z)
        self.discriminator = build(DIM, 1)
        self.optimizer_e = torch.optim.Adam(self.encoder.parameters(), lr=2e-3)
        self.optimizer_d = torch.optim.SGD(self.discriminator.parameters(), lr=0.05)

    def sample(self, n=64):
        with torch.no_grad():
            return self.generator(torch.randn(n, Z)) * 2 + 0.1 * torch.randn(n, DIM)

    def train_step(self):
        x = self.sample()
        x_rec = self.generator(self.encoder(x))

        loss_d = F.softplus(-self.discriminator(x)).mean() + F.softplus(self.discriminator(x_rec.detach())).mean()
        loss_d.backward()
        norm_d = grad_norm(self.discriminator)
        self.optimizer_d.step()

        loss_adv = F.softplus(-self.discriminator(x_rec)).mean()
        loss_e = F.mse_loss(x_rec, x) + 0.1 * loss_adv
        self.optimizer_e.zero_grad()
        loss_e.backward()
        self.optimizer_e.step()
        return loss_e.item(), loss_d.item(), norm_d


run = Inverter()
for step in range(30):
    loss_e, loss_d, norm_d = run.train_step()
    if step % 5 == 0 or step == 29:
        print(f"step {step:2d} E {loss_e:.4f} D {loss_d:.4f} D grad norm {norm_d:.3f}")
