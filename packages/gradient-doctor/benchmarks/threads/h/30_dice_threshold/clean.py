import torch
import torch.nn as nn

torch.manual_seed(29)
SIZE = 16


def _threshold(x, threshold=None):
    if threshold is not None:
        return torch.tensor((x > threshold).type(x.dtype), requires_grad=True)
    return x


class DiceLoss(nn.Module):
    def __init__(self, eps=1.0, threshold=None):
        super().__init__()
        self.eps = eps
        self.threshold = threshold

    def forward(self, logits, gt):
        pr = _threshold(torch.sigmoid(logits), self.threshold)
        tp = (pr * gt).sum()
        fp = pr.sum() - tp
        fn = gt.sum() - tp
        return 1 - (2 * tp + self.eps) / (2 * tp + fn + fp + self.eps)


class SmallSegNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        return self.out(self.mid(self.down(x)))


def tiles(n):
    mask = torch.zeros(n, 1, SIZE, SIZE)
    for i in range(n):
        r, c = torch.randint(0, SIZE - 6, (2,)).tolist()
        mask[i, 0, r:r + 6, c:c + 6] = 1.0
    return mask + 0.5 * torch.randn_like(mask), mask


img, mask = tiles(96)
model = SmallSegNet()
criterion = DiceLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(25):
    total = 0.0
    for i in range(0, 96, 16):
        loss = criterion(model(img[i:i + 16]), mask[i:i + 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if epoch % 4 == 0:
        print(f"epoch {epoch} dice loss {total / 6:.4f}")
