import torch
import torch.nn as nn
from torch import optim
from torch.utils.data import DataLoader, Dataset


class Slices(Dataset):
    def __init__(self, n=160, size=16):
        g = torch.Generator().manual_seed(11)
        self.image = 0.4 * torch.randn(n, 1, size, size, generator=g)
        self.mask = torch.zeros(n, 1, size, size)
        for k in range(n):
            r, c, h, w = (torch.randint(2, 8, (4,), generator=g)).tolist()
            self.mask[k, 0, r : r + h, c : c + w] = 1
        self.image += 0.7 * self.mask

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return {"input": self.image[i], "gt": self.mask[i]}


class SmallUnet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        self.mid = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2))
        self.up = nn.Sequential(nn.Conv2d(3 * c, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, 1, 1))

    def forward(self, x):
        skip = self.down(x)
        return torch.sigmoid(self.up(torch.cat([skip, self.mid(skip)], 1)))


def dice_loss(pred, gt, smooth=1.0):
    inter = (pred * gt).sum()
    return -(2.0 * inter + smooth) / (pred.sum() + gt.sum() + smooth)


def cmd_train(context):
    torch.manual_seed(context["seed"])
    loader = DataLoader(Slices(), batch_size=context["batch_size"], shuffle=True)
    model = SmallUnet()
    optimizer = optim.SGD(model.parameters(), lr=context["initial_lr"], momentum=0.9)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, gamma=context["gamma"])

    for epoch in range(1, context["num_epochs"] + 1):
        lr = scheduler.get_last_lr()[0]
        model.train()
        train_loss_total, num_steps = 0.0, 0
        for batch in loader:
            preds = model(batch["input"])
            loss = dice_loss(preds, batch["gt"])
            train_loss_total += loss.item()

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_steps += 1
        scheduler.step()
        print(f"epoch {epoch} lr {lr:.2e} dice loss {train_loss_total / num_steps:.4f}")


cmd_train({"seed": 0, "batch_size": 8, "initial_lr": 0.02, "gamma": 0.7, "num_epochs": 8})
