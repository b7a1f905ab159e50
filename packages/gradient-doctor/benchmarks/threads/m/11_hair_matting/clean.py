import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class ImageGradientLoss(nn.Module):
    def __init__(self):
        super().__init__()
        sobel = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]]).view(1, 1, 3, 3)
        self.register_buffer("kx", sobel)
        self.register_buffer("ky", sobel.transpose(2, 3).contiguous())

    def gradients(self, img):
        return F.conv2d(img, self.kx, padding=1), F.conv2d(img, self.ky, padding=1)

    def forward(self, pred, gray):
        b, _, h, w = pred.shape
        mask = pred[:, 1].view(b, 1, h, w)
        ix, iy = self.gradients(gray)
        mx, my = self.gradients(mask)
        mag = torch.sqrt(mx.pow(2) + my.pow(2) + 1e-6)
        norm = torch.sqrt(ix.pow(2) + iy.pow(2) + 1e-6)
        align = (ix * mx + iy * my) / (norm * mag)
        return (mag * (1 - align.pow(2))).mean()


class HairNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(),
            nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(),
            nn.Conv2d(12, 2, 1))

    def forward(self, x):
        return self.net(x)


def samples(n=8, size=24):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    cx, cy = torch.randint(6, 18, (2, n, 1, 1))
    mask = ((xx - cx) ** 2 + (yy - cy) ** 2 < 30).long()
    gray = mask.float().unsqueeze(1) + 0.35 * torch.randn(n, 1, size, size)
    return gray, mask


model, grad_loss = HairNet(), ImageGradientLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
GRAD_LAMBDA = 0.5
for step in range(100):
    gray, mask = samples()
    out = model(gray)
    bce = F.cross_entropy(out, mask)
    edge = grad_loss(out.softmax(1), gray)
    loss = bce + GRAD_LAMBDA * edge
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1}: ce {bce.item():.3f}  edge {edge.item():.3f}")
