import torch
import torch.nn as nn
import torch.nn.functional as F


class ConvBlock(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(nn.Conv2d(cin, cout, 3, padding=1), nn.ELU())


class DepthDecoder(nn.Module):
    def __init__(self, uncert=True):
        super().__init__()
        self.enc = nn.Sequential(ConvBlock(3, 16), nn.AvgPool2d(2), ConvBlock(16, 24))
        self.up = ConvBlock(24, 16)
        self.dispconv = nn.Conv2d(16, 1, 3, padding=1)
        self.uncertconv = nn.Conv2d(16, 1, 3, padding=1)
        self.uncert = uncert

    def forward(self, image):
        x = self.enc(image)
        x = F.interpolate(self.up(x), scale_factor=2, mode="nearest")
        out = {"disp": torch.sigmoid(self.dispconv(x))}
        if self.uncert:
            out["uncert"] = self.uncertconv(x)
        return out


def log_likelihood_loss(out, target):
    error = (out["disp"] - target).abs()
    return (error / out["uncert"] + torch.log(out["uncert"])).mean()


def batch(n=6, size=16):
    ramp = torch.linspace(0.1, 0.9, size).view(1, 1, size, 1)
    disp = (ramp + 0.2 * torch.rand(n, 1, 1, 1) - 0.1).expand(n, 1, size, size).clone()
    noisy = torch.zeros(n, 1, size, size)
    noisy[..., size // 2:] = 1.0
    target = (disp + 0.15 * noisy * torch.randn_like(disp)).clamp(0.02, 0.98)
    image = torch.cat([disp, noisy, disp ** 2], 1) + 0.02 * torch.randn(n, 3, size, size)
    return image, target


def main():
    torch.manual_seed(3)
    net = DepthDecoder()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for it in range(151):
        image, target = batch()
        out = net(image)
        loss = log_likelihood_loss(out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 30 == 0:
            err = (out["disp"] - target).abs().mean().item()
            print(f"it {it}  nll {loss.item():.4f}  abs error {err:.4f}")


if __name__ == "__main__":
    main()
