import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
FRAMES, SIZE = 5, 8


class VideoODE(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.encode = nn.Linear(SIZE * SIZE, hidden)
        self.drift = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, hidden))
        self.decode = nn.Linear(hidden, SIZE * SIZE)

    def forward(self, first):
        h = torch.tanh(self.encode(first.flatten(1)))
        frames = []
        for _ in range(FRAMES):
            h = h + 0.25 * self.drift(h)
            frames.append(torch.sigmoid(self.decode(h)).view(-1, SIZE, SIZE))
        return torch.stack(frames, dim=1)


class FrameDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(SIZE * SIZE, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))

    def forward(self, video):
        return self.net(video.flatten(2))


def clips(n):
    column = torch.randint(0, SIZE, (n,))
    video = torch.zeros(n, FRAMES + 1, SIZE, SIZE)
    for t in range(FRAMES + 1):
        video[torch.arange(n), t, :, (column + t) % SIZE] = 1.0
    return video[:, 0], video[:, 1:]


def train(netG, netD, steps=151):
    optimizer_netG = torch.optim.Adamax(netG.parameters(), lr=5e-3)
    optimizer_netD = torch.optim.Adamax(netD.parameters(), lr=1e-3)
    for step in range(steps):
        first, real = clips(16)
        fake = netG(first)
        pred_real, pred_fake = netD(real), netD(fake.detach())
        loss_netD = F.mse_loss(pred_real, torch.ones_like(pred_real)) + F.mse_loss(pred_fake, torch.zeros_like(pred_fake))
        judged = netD(fake)
        loss_netG = F.mse_loss(fake, real) + 0.003 * F.mse_loss(judged, torch.ones_like(judged))

        # Train G
        optimizer_netG.zero_grad()
        loss_netG.backward()
        optimizer_netG.step()

        # Train D
        optimizer_netD.zero_grad()
        loss_netD.backward()
        optimizer_netD.step()

        if step % 30 == 0:
            print(f"step {step:3d}  D {loss_netD.item():.4f}  G {loss_netG.item():.4f}")


train(VideoODE(), FrameDiscriminator())
