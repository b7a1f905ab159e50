import torch
import torch.nn as nn

torch.manual_seed(3)

LATENT = 4


def mlp(i, o, hidden=32):
    return nn.Sequential(nn.Linear(i, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, o))


def real_batch(n):
    angle = torch.rand(n, 1) * 6.2832
    return torch.cat([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(n, 2)


def train(steps=20, batch=64):
    generator = mlp(LATENT, 2)
    discriminator = mlp(2, 1)
    optim_g = torch.optim.Adam(generator.parameters(), lr=2e-3)
    optim_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3)
    bce = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(batch, 1), torch.zeros(batch, 1)

    for step in range(steps):
        real = real_batch(batch)
        fake = generator(torch.randn(batch, LATENT))
        score_fake = discriminator(fake)
        score_real = discriminator(real)

        loss_g = bce(score_fake, ones)
        loss_d = bce(score_real, ones) + bce(discriminator(fake.detach()), zeros)

        optim_g.zero_grad()
        loss_g.backward()
        optim_g.step()

        optim_d.zero_grad()
        loss_d.backward()
        optim_d.step()

        if step % 5 == 0:
            print(f"step {step:2d}  G {loss_g.item():.3f}  D {loss_d.item():.3f}")


if __name__ == "__main__":
    train()
