import torch
import torch.nn as nn
import torch.nn.functional as F


class InpaintNet(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, ch, 3, padding=1), nn.ELU(), nn.Conv2d(ch, ch, 3, padding=2, dilation=2), nn.ELU(),
            nn.Conv2d(ch, ch, 3, padding=4, dilation=4), nn.ELU(), nn.Conv2d(ch, 1, 3, padding=1),
        )

    def forward(self, img, mask):
        guess = self.net(torch.cat([img * (1 - mask), mask], 1))
        return img * (1 - mask) + guess * mask


class PatchDiscriminator(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, ch, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(ch, ch, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(ch, 1, 3, padding=1),
        )

    def forward(self, img, mask):
        return self.net(torch.cat([img, mask], 1))


def textures(n, side=16):
    phase, freq = 6.28 * torch.rand(n, 1, 1, 1), 1 + torch.rand(n, 1, 1, 1)
    grid = torch.arange(side).float()
    img = torch.sin(freq * (grid[:, None] + grid[None, :]) + phase) + 0.3 * torch.randn(n, 1, side, side)
    mask = torch.zeros(n, 1, side, side)
    r, c = torch.randint(2, 7, (2,)).tolist()
    mask[:, :, r:r + 8, c:c + 8] = 1.0
    return img, mask


def trainer(iters=160, lambda_l1=10.0, lambda_gan=0.2):
    generator, discriminator = InpaintNet(), PatchDiscriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for batch_idx in range(1, iters + 1):
        img, mask = textures(16)

        optimizer_d.zero_grad()
        fake = generator(img, mask)
        fake_scalar = discriminator(fake.detach(), mask)
        true_scalar = discriminator(img, mask)
        loss_fake = F.relu(1.0 + fake_scalar).mean()
        loss_true = F.relu(1.0 - true_scalar).mean()
        loss_D = 0.5 * (loss_fake + loss_true)
        loss_D.backward()

        optimizer_g.zero_grad()
        l1 = ((fake - img).abs() * mask).sum() / mask.sum()
        gan = -discriminator(fake, mask).mean()
        loss_G = lambda_l1 * l1 + lambda_gan * gan
        loss_G.backward()
        optimizer_g.step()

        if batch_idx % 20 == 0:
            print(f"[{batch_idx}/{iters}] l1 {l1.item():.3f} D {loss_D.item():.3f} "
                  f"score true {true_scalar.mean().item():+.2f} fake {fake_scalar.mean().item():+.2f}")


torch.manual_seed(6)
trainer()
