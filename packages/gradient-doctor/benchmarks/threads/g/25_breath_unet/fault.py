import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(61)


class Block(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.conv = nn.Conv1d(c_in, c_out, 7, padding=3)
        self.norm = nn.GroupNorm(2, c_out)

    def forward(self, x):
        return self.norm(self.conv(x))


class BreathNet(nn.Module):
    """Heart signal in, breathing curve out."""

    def __init__(self, width=8):
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.enter = Block(1, width)
        self.down = Block(width, width)
        self.up = nn.Conv1d(2 * width, width, 7, padding=3)
        self.out = nn.Conv1d(width, 1, 1)

    def forward(self, x):
        top = self.enter(x)
        low = self.down(F.avg_pool1d(torch.sigmoid(top) * top, 2))
        low = F.interpolate(self.act(low), scale_factor=2.0)
        both = torch.cat([self.act(top), low], dim=1)
        return self.out(self.act(self.up(both)))


def record(n, length=128):
    t = torch.linspace(0, 6.28, length)
    breath = torch.sin(t * (1 + torch.rand(n, 1)) + 6.28 * torch.rand(n, 1))
    ecg = (1 + 0.5 * breath) * torch.sin(18 * t)
    return ecg.unsqueeze(1) + 0.05 * torch.randn(n, 1, length), breath.unsqueeze(1)


net = BreathNet()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(121):
    ecg, breath = record(16)
    loss = F.smooth_l1_loss(net(ecg), breath)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
