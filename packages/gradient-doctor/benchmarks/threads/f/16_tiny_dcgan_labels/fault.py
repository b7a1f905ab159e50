from __future__ import print_function
import torch
import torch.nn as nn
import torch.optim as optim

nz, ngf, ndf, batch_size, niter = 8, 8, 8, 16, 40
real_label = 1
fake_label = 0
torch.manual_seed(999)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.05)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


netG = nn.Sequential(
    nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
    nn.ConvTranspose2d(ngf, 1, 3, 1, 1, bias=False), nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf * 2, 1, 2, 1, 0, bias=False), nn.Sigmoid(),
)
netG.apply(weights_init)
netD.apply(weights_init)


def real_images():
    r = torch.linspace(-1, 1, 8)
    disc = ((r[:, None] ** 2 + r[None] ** 2) < 0.6).float() * 2 - 1
    return (disc + 0.05 * torch.randn(batch_size, 1, 8, 8)).clamp(-1, 1)


criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=0.0005, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.005, betas=(0.5, 0.999))

print("Starting Training Loop...")
for i in range(niter * 5):
    netD.zero_grad()
    real = real_images()
    label = torch.full((batch_size,), real_label)
    errD_real = criterion(netD(real).view(-1), label)
    errD_real.backward()

    fake = netG(torch.randn(batch_size, nz, 1, 1))
    label.fill_(fake_label)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()

    netG.zero_grad()
    label.fill_(real_label)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
    if i % 40 == 39:
        gap = (fake.mean(0) - real.mean(0)).abs().mean().item()
        print("[%d] Loss_D: %.4f Loss_G: %.4f pixel gap: %.3f" % (i + 1, (errD_real + errD_fake).item(), errG.item(), gap))
