import torch
import torch.nn.functional as F
from torch import nn, optim

torch.manual_seed(0)


def conv_block(c_in, c_out):
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.LeakyReLU(0.2))


class Generator(nn.Module):
    def __init__(self, nfc=12):
        super().__init__()
        self.head = conv_block(1, nfc)
        self.body = conv_block(nfc, nfc)
        self.tail = nn.Sequential(nn.Conv2d(nfc, 1, 3, padding=1), nn.Tanh())

    def forward(self, noise, prev):
        return self.tail(self.body(self.head(noise + prev))) + prev


class PatchDiscriminator(nn.Module):
    def __init__(self, nfc=12):
        super().__init__()
        self.net = nn.Sequential(conv_block(1, nfc), conv_block(nfc, nfc), nn.Conv2d(nfc, 1, 3))

    def forward(self, x):
        return self.net(x)


def real_image(size=20):
    t = torch.linspace(0, 9.4, size)
    return (torch.sin(t)[None, :] * torch.cos(0.7 * t)[:, None])[None, None]


def train_single_scale(netG, netD, real, Gsteps=3, Dsteps=3, alpha=10.0, niter=40):
    optimizerD = optim.Adam(netD.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=5e-4, betas=(0.5, 0.999))
    z_opt = 0.1 * torch.randn_like(real)
    prev = torch.zeros_like(real)
    for epoch in range(niter):
        noise = 0.1 * torch.randn_like(real)
        for j in range(Dsteps):
            netD.zero_grad()
            errD_real = -netD(real).mean()
            fake = netG(noise, prev)
            errD_fake = netD(fake.detach()).mean()
            (errD_real + errD_fake).backward()
            optimizerD.step()

        for j in range(Gsteps):
            netG.zero_grad()
            errG = -netD(fake).mean()
            errG.backward(retain_graph=True)
            rec_loss = alpha * F.mse_loss(netG(z_opt, prev), real)
            rec_loss.backward(retain_graph=True)
            optimizerG.step()

        if epoch % 8 == 7:
            print(f"iter {epoch + 1}  errD {(errD_real + errD_fake).item():.4f}  errG {errG.item():.4f}  reconstruction {rec_loss.item() / alpha:.4f}")


train_single_scale(Generator(), PatchDiscriminator(), real_image())
