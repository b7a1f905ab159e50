import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Refiner(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(channels + 1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 3, padding=1))

    def forward(self, feats, depth):
        return depth + self.net(torch.cat([feats, depth], dim=1))


class DepthModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.coarse = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 3, padding=1))
        self.refine_quarter = Refiner(3)
        self.refine_half = Refiner(3)
        self.refine_full = Refiner(3)

    def training_step(self, image, depth_gt):
        out = {}

        def at(x, size):
            return F.interpolate(x, size=size, mode="bilinear", align_corners=False)

        pred = self.coarse(at(image, 4))
        loss = F.l1_loss(pred, at(depth_gt, 4))
        out["coarse"] = loss.item()

        pred = self.refine_quarter(at(image, 8), at(pred.detach(), 8))
        loss_refine_quarter = F.l1_loss(pred, at(depth_gt, 8))
        out["quarter"] = loss_refine_quarter.item()

        pred = self.refine_half(at(image, 16), at(pred, 16))
        loss_refine_half = F.l1_loss(pred, at(depth_gt, 16))
        out["half"] = loss_refine_half.item()

        pred = self.refine_full(image, at(pred, 32))
        loss_refine_full = F.l1_loss(pred, depth_gt)
        out["full"] = loss_refine_full.item()
        return loss + loss_refine_quarter + loss_refine_half + loss_refine_full, out


def views(n=4):
    grid = torch.linspace(-1, 1, 32)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    cx, cy = torch.rand(2, n, 1, 1) * 1.2 - 0.6
    blob = torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / 0.08)
    depth = (2 - blob).unsqueeze(1)
    image = torch.stack([blob, xx.expand(n, -1, -1), yy.expand(n, -1, -1)], dim=1)
    return image + 0.02 * torch.randn_like(image), depth


model = DepthModel()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(161):
    loss, out = model.training_step(*views())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step:3d}  " + "  ".join(f"{k} {v:.4f}" for k, v in out.items()))
