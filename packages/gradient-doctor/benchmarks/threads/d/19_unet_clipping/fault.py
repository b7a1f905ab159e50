import logging

import torch
import torch.nn as nn
import torch.nn.functional as F

logging.basicConfig(level=logging.INFO, format="%(message)s")


class DoubleConv(nn.Sequential):
    def __init__(self, n_in, n_out):
        super().__init__(
            nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.GroupNorm(4, n_out), nn.ReLU(inplace=True),
            nn.Conv2d(n_out, n_out, 3, padding=1, bias=False), nn.GroupNorm(4, n_out), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, n_channels=1, n_classes=2, width=8):
        super().__init__()
        self.inc = DoubleConv(n_channels, width)
        self.down = DoubleConv(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.conv = DoubleConv(2 * width, width)
        self.outc = nn.Conv2d(width, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down(F.max_pool2d(x1, 2))
        return self.outc(self.conv(torch.cat([x1, self.up(x2)], 1)))


def dice_loss(probs, onehot, eps=1e-6):
    inter = 2 * (probs * onehot).sum((2, 3))
    return 1 - ((inter + eps) / (probs.sum((2, 3)) + onehot.sum((2, 3)) + eps)).mean()


def carvana(n=8, size=16):
    grid = torch.arange(size).float()
    centre, radius = torch.rand(n, 2, 1, 1) * 8 + 4, torch.rand(n, 1, 1) * 2 + 3
    mask = ((grid.view(1, -1, 1) - centre[:, 0]) ** 2 + (grid.view(1, 1, -1) - centre[:, 1]) ** 2 < radius ** 2).long()
    return (0.8 * mask + 0.4 * torch.randn(n, size, size)).unsqueeze(1), mask


def train_model(model, epochs=5, batches=25, learning_rate=0.05, amp=True, gradient_clipping=1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=amp)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, epochs + 1):
        epoch_loss = 0.0
        for _ in range(batches):
            images, true_masks = carvana()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                masks_pred = model(images)
                loss = criterion(masks_pred, true_masks)
                onehot = F.one_hot(true_masks, 2).permute(0, 3, 1, 2).float()
                loss = loss + dice_loss(F.softmax(masks_pred, dim=1).float(), onehot)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            epoch_loss += loss.item() / batches
        logging.info(f"Epoch {epoch}/{epochs} train loss {epoch_loss:.4f}")


torch.manual_seed(0)
train_model(UNet())
