import math
import torch
import torch.nn as nn

torch.manual_seed(5)
GRID, STRIDE = 6, 16


def anchor_centers():
    g = (torch.arange(GRID).float() + 0.5) * STRIDE
    yy, xx = torch.meshgrid(g, g, indexing="ij")
    return torch.stack([xx, yy], -1).view(-1, 2)


class AngleIoULoss(nn.Module):
    def __init__(self, eps=1e-7):
        super().__init__()
        self.eps = eps

    def forward(self, p, g):
        p1, p2 = p[:, :2] - p[:, 2:] / 2, p[:, :2] + p[:, 2:] / 2
        g1, g2 = g[:, :2] - g[:, 2:] / 2, g[:, :2] + g[:, 2:] / 2
        wh = (torch.min(p2, g2) - torch.max(p1, g1)).clamp(min=0)
        inter = wh[:, 0] * wh[:, 1]
        union = p[:, 2] * p[:, 3] + g[:, 2] * g[:, 3] - inter + self.eps
        iou = inter / union
        c = torch.max(p2, g2) - torch.min(p1, g1) + self.eps
        dx, dy = g[:, 0] - p[:, 0], g[:, 1] - p[:, 1]
        sigma = torch.sqrt(dx ** 2 + dy ** 2)
        sin_a = dx.abs() / sigma
        sin_b = dy.abs() / sigma
        s = torch.where(sin_a > math.sqrt(0.5), sin_b, sin_a)
        angle = 2 * s * torch.sqrt((1 - s ** 2).clamp(min=self.eps))
        gamma = 2 - angle
        dist = 2 - torch.exp(-gamma * (dx / c[:, 0]) ** 2) - torch.exp(-gamma * (dy / c[:, 1]) ** 2)
        return (1 - iou + 0.5 * dist).mean()


class BoxHead(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, dim), nn.SiLU())
        self.reg = nn.Linear(dim, 4)
        nn.init.zeros_(self.reg.weight)
        nn.init.zeros_(self.reg.bias)

    def forward(self, feats, centers):
        r = self.reg(self.stem(feats))
        xy = centers + r[:, :2] * STRIDE
        wh = torch.exp(r[:, 2:].clamp(max=4.0)) * STRIDE
        return torch.cat([xy, wh], 1)


centers = anchor_centers()
n = len(centers)
shift = torch.randint(-1, 2, (n, 2)).float() * 4
size = STRIDE * (0.6 + torch.rand(n, 2))
gt = torch.cat([centers + shift, size], 1)
feats = torch.cat([shift / 4, size / STRIDE, torch.randn(n, 2) * 0.1], 1)

head, crit = BoxHead(), AngleIoULoss()
opt = torch.optim.AdamW(head.parameters(), lr=5e-3)
for step in range(150):
    loss = crit(head(feats, centers), gt)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 25 == 0 or step == 149:
        print(f"step {step} box loss {loss.item():.4f}")
