import torch
import torch.nn as nn
import torch.nn.functional as F


class ColorMap(nn.Module):
    """Per colour affine mapping from source to target domain."""

    def __init__(self, bins=8):
        super().__init__()
        self.bins = bins
        self.w = nn.Parameter(torch.ones(bins ** 3, 3))
        self.b = nn.Parameter(torch.zeros(bins ** 3, 3))

    def forward(self, img):
        idx = (img * self.bins).long().clamp(0, self.bins - 1)
        key = (idx[..., 0] * self.bins + idx[..., 1]) * self.bins + idx[..., 2]
        return img * self.w[key] + self.b[key]


class ColorDiscriminator(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, dim), nn.LeakyReLU(0.2), nn.Linear(dim, dim), nn.LeakyReLU(0.2), nn.Linear(dim, 1))

    def forward(self, img):
        return self.net(img)


class ColorMapGAN:
    def __init__(self, lr_g=2e-3, lr_d=2e-3):
        self.gen = ColorMap()
        self.disc = ColorDiscriminator()
        self.optim_g = torch.optim.Adam(self.gen.parameters(), lr=lr_g, betas=(0.5, 0.999))
        self.optim_d = torch.optim.Adam(self.gen.parameters(), lr=lr_d, betas=(0.5, 0.999))

    def step(self, source, target):
        fake = self.gen(source)
        self.disc.zero_grad()
        loss_d = F.mse_loss(self.disc(target), torch.ones(len(target), 1)) + \
            F.mse_loss(self.disc(fake.detach()), torch.zeros(len(source), 1))
        loss_d.backward()
        self.optim_d.step()

        self.gen.zero_grad()
        loss_g = F.mse_loss(self.disc(fake), torch.ones(len(source), 1))
        loss_g.backward()
        self.optim_g.step()
        return loss_d.item(), loss_g.item()


def tiles(n, target=False):
    img = (0.2 * torch.randn(n, 3) + 0.45).clamp(0, 0.999)
    if target:
        img = (img * torch.tensor([0.7, 1.0, 0.9]) + torch.tensor([0.25, -0.1, 0.0])).clamp(0, 0.999)
    return img


if __name__ == "__main__":
    torch.manual_seed(0)
    gan = ColorMapGAN()
    running = [0.0, 0.0]
    for it in range(1, 601):
        d, g = gan.step(tiles(256), tiles(256, target=True))
        running[0] += d
        running[1] += g
        if it % 120 == 0:
            with torch.no_grad():
                gap = (gan.gen(tiles(4000)).mean(0) - tiles(4000, target=True).mean(0)).abs().mean()
            print(f"it {it}  loss_d {running[0] / 120:.4f}  loss_g {running[1] / 120:.4f}  colour gap {gap:.4f}")
            running = [0.0, 0.0]
