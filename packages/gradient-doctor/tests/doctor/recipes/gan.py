"""A small GAN: two optimizers, fakes detached for the discriminator, an R1 gradient penalty."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, ROWS, NOISE, HIDDEN, POINT, PENALTY = 4, 16, 5, 16, 2, 0.1


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NOISE, HIDDEN), nn.LeakyReLU(0.2))
        self.out = nn.Linear(HIDDEN, POINT)

    def forward(self, noise):
        return self.out(self.body(noise))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(POINT, HIDDEN), nn.Softplus())
        self.score = nn.Linear(HIDDEN, 1)

    def forward(self, point):
        return self.score(self.body(point)).squeeze(-1)


def make_batch(random):
    angle = 6.28 * torch.rand(ROWS, generator=random)
    real = torch.stack([angle.cos(), angle.sin()], dim=-1)
    noise = torch.randn(ROWS, NOISE, generator=random)
    return {"real": real, "noise": noise}


def discriminator_loss(generator, discriminator, batch):
    fake = generator(batch["noise"]).detach()
    real = batch["real"].clone().requires_grad_()
    real_score, fake_score = discriminator(real), discriminator(fake)
    real_loss = F.binary_cross_entropy_with_logits(real_score, torch.ones_like(real_score))
    fake_loss = F.binary_cross_entropy_with_logits(fake_score, torch.zeros_like(fake_score))
    (slope,) = torch.autograd.grad(real_score.sum(), [real], create_graph=True)
    penalty = slope.square().sum(-1).mean()
    return real_loss + fake_loss + PENALTY * penalty


def generator_loss(generator, discriminator, batch):
    fake = generator(batch["noise"])
    score = discriminator(fake)
    return F.binary_cross_entropy_with_logits(score, torch.ones_like(score))


def build():
    torch.manual_seed(0)
    generator, discriminator = Generator(), Discriminator()
    slow = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    fast = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    return generator, discriminator, slow, fast


def main():
    generator, discriminator, slow, fast = build()
    random = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        batch = make_batch(random)
        fast.zero_grad()
        judge = discriminator_loss(generator, discriminator, batch)
        judge.backward()
        fast.step()
        batch = make_batch(random)
        slow.zero_grad()
        forge = generator_loss(generator, discriminator, batch)
        forge.backward()
        slow.step()
        print(f"step {step} discriminator {judge.item():.3f} generator {forge.item():.3f}")


if __name__ == "__main__":
    main()
