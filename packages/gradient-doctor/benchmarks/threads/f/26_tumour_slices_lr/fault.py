import torch
import torch.nn as nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset


def conv_block(i, o, p=0.1):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.Dropout2d(p))


class Unet(nn.Module):
    def __init__(self, base=8):
        super().__init__()
        self.enc, self.mid = conv_block(1, base), conv_block(base, 2 * base)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.dec, self.last = conv_block(3 * base, base), nn.Conv2d(base, 1, 1)

    def forward(self, x):
        e = self.enc(x)
        m = self.up(self.mid(self.pool(e)))
        return torch.sigmoid(self.last(self.dec(torch.cat([e, m], 1))))


def dice_loss(pred, gt, smooth=1.0):
    inter = (pred * gt).sum((1, 2, 3))
    return 1 - ((2 * inter + smooth) / (pred.sum((1, 2, 3)) + gt.sum((1, 2, 3)) + smooth)).mean()


def slices(n, side=16):
    img, gt = 0.6 * torch.randn(n, 1, side, side), torch.zeros(n, 1, side, side)
    for i in range(n):
        r, c, h = torch.randint(1, 9, (3,)).tolist()
        gt[i, 0, r:r + 3 + h // 3, c:c + 5] = 1.0
    return TensorDataset(img + gt, gt)


def cmd_train(context):
    train_loader = DataLoader(slices(160), batch_size=context["batch_size"], shuffle=True)
    val_loader = DataLoader(slices(80), batch_size=40)
    model = Unet()
    optimizer = torch.optim.Adam(model.parameters(), lr=context["initial_lr"])
    scheduler = lr_scheduler.ExponentialLR(optimizer, context["decay"])

    for epoch in range(1, context["num_epochs"] + 1):
        model.train()
        train_loss_total = 0.0
        for input_samples, gt_samples in train_loader:
            preds = model(input_samples)
            loss = dice_loss(preds, gt_samples)
            train_loss_total += loss.item() / len(train_loader)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

        model.eval()
        with torch.no_grad():
            val = sum(dice_loss(model(x), y).item() for x, y in val_loader) / len(val_loader)
        lr = optimizer.param_groups[0]["lr"]
        print(f"Epoch {epoch} training loss: {train_loss_total:.4f} validation loss: {val:.4f} lr {lr:.2e}")


if __name__ == "__main__":
    torch.manual_seed(0)
    cmd_train({"batch_size": 8, "initial_lr": 1e-2, "decay": 0.7, "num_epochs": 7})
