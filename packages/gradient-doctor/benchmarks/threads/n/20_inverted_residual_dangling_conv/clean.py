import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class InvertedResidualBlock(nn.Module):
    def __init__(self, cin, cout, stride, expand=4):
        super().__init__()
        self.cin, self.cout, self.stride = cin, cout, stride
        mid = cin * expand
        self.project = nn.Conv2d(cin, cout, 1)
        self.block = nn.Sequential(
            nn.Conv2d(cin, mid, 1, bias=False), nn.BatchNorm2d(mid), nn.ReLU6(),
            nn.Conv2d(mid, mid, 3, stride, 1, groups=mid, bias=False), nn.BatchNorm2d(mid), nn.ReLU6(),
            nn.Conv2d(mid, cout, 1, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        out = self.block(x)
        if self.stride == 1:
            if self.cin != self.cout:
                x = self.project(x)
            out = out + x
        return out


class TinyUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = InvertedResidualBlock(3, 8, 1)
        self.down = InvertedResidualBlock(8, 16, 2)
        self.mid = InvertedResidualBlock(16, 16, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.merge = InvertedResidualBlock(16, 8, 1)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        skip = self.stem(x)
        deep = self.up(self.mid(self.down(skip)))
        return self.head(self.merge(torch.cat([skip, deep], 1)))


def portraits(n=16, size=16):
    centers = torch.randint(4, 12, (n, 2, 1, 1)).float()
    radius = torch.rand(n, 1, 1) * 2 + 2
    grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).float()
    mask = ((grid[None] - centers).pow(2).sum(1).sqrt() < radius).float()[:, None]
    image = 0.5 * torch.randn(n, 3, size, size) + mask * torch.tensor([0.8, -0.6, 0.4])[:, None, None]
    return image, mask


def iou(logits, mask):
    predicted = (logits > 0).float()
    return ((predicted * mask).sum() / ((predicted + mask) > 0).sum()).item()


model = TinyUNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(101):
    image, mask = portraits()
    logits = model(image)
    loss = F.binary_cross_entropy_with_logits(logits, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}  iou {iou(logits, mask):.3f}")
