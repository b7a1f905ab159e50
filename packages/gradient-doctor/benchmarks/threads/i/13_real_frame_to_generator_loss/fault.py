import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(13)
FRAME = 16


def block(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, n_out))


class RecyclePair:
    """Translates frames of domain A to domain B and back, without paired data."""

    def __init__(self):
        self.a2b, self.b2a = block(FRAME, FRAME), block(FRAME, FRAME)
        self.disc_b = block(FRAME, 1)
        gen = list(self.a2b.parameters()) + list(self.b2a.parameters())
        self.opt_g = torch.optim.Adam(gen, lr=1e-3, betas=(0.5, 0.99))
        self.opt_d = torch.optim.Adam(self.disc_b.parameters(), lr=1e-3, betas=(0.5, 0.99))

    def generator_loss(self, true_a, recycled_a, frame_b):
        score = self.disc_b(frame_b)
        adversarial = F.mse_loss(score, torch.ones_like(score))
        return adversarial, 2.0 * F.l1_loss(recycled_a, true_a)

    def discriminator_loss(self, real_b, fake_b):
        real, fake = self.disc_b(real_b), self.disc_b(fake_b.detach())
        return F.mse_loss(real, torch.ones_like(real)) + F.mse_loss(fake, torch.zeros_like(fake))

    def update(self, true_a, true_b):
        fake_b = self.a2b(true_a)
        recycled_a = self.b2a(fake_b)

        adversarial, recycle = self.generator_loss(true_a, recycled_a, true_b)
        self.opt_g.zero_grad()
        (adversarial + recycle).backward()
        self.opt_g.step()

        loss_d = self.discriminator_loss(true_b, fake_b)
        self.opt_d.zero_grad()
        loss_d.backward()
        self.opt_d.step()
        return adversarial.item(), recycle.item(), loss_d.item()


mix = torch.randn(3, FRAME)


def frames(n, shift):
    return torch.tanh(torch.randn(n, 3) @ mix * 0.4) + shift


pair = RecyclePair()
for it in range(400):
    adversarial, recycle, loss_d = pair.update(frames(64, 0.0), frames(64, 1.5))
    if it % 50 == 0 or it == 399:
        with torch.no_grad():
            mean = pair.a2b(frames(256, 0.0)).mean().item()
        print(f"{it:4d}  adv {adversarial:.3f}  recycle {recycle:.3f}  D {loss_d:.3f}  mean of translated frames {mean:.2f}")
