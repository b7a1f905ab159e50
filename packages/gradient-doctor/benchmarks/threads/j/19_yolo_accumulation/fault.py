import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


class Darknet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        def block(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.1))
        self.backbone = nn.Sequential(block(3, 16), block(16, 32))
        self.yolo = nn.Conv2d(32, 1 + 2 + classes, 1)

    def forward(self, imgs, targets=None):
        out = self.yolo(self.backbone(imgs))
        obj, xy, cls = out[:, 0], out[:, 1:3], out[:, 3:]
        if targets is None:
            return out
        t_obj, t_xy, t_cls = targets
        mask = t_obj.bool()
        loss_obj = F.binary_cross_entropy_with_logits(obj, t_obj)
        loss_xy = F.mse_loss(xy.permute(0, 2, 3, 1)[mask].sigmoid(), t_xy[mask])
        loss_cls = F.cross_entropy(cls.permute(0, 2, 3, 1)[mask], t_cls[mask])
        return loss_obj + loss_xy + loss_cls, out


def load(n_batches, batch=8, size=16, classes=4):
    for _ in range(n_batches):
        imgs = 0.1 * torch.rand(batch, 3, size, size)
        cells = size // 4
        t_obj = torch.zeros(batch, cells, cells)
        t_xy = torch.full((batch, cells, cells, 2), 0.5)
        t_cls = torch.randint(0, classes, (batch, cells, cells))
        for b in range(batch):
            r, c = torch.randint(0, cells, (2,)).tolist()
            k = int(t_cls[b, r, c])
            imgs[b, k % 3, 4 * r:4 * r + 4, 4 * c:4 * c + 2 + 2 * (k == 3)] += 1.0
            t_obj[b, r, c] = 1.0
        yield imgs, (t_obj, t_xy, t_cls)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--gradient_accumulations", type=int, default=1, help="number of gradient accums before step")
    opt = parser.parse_args()

    torch.manual_seed(0)
    model = Darknet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    n_batches = 25
    for epoch in range(opt.epochs):
        model.train()
        for batch_i, (imgs, targets) in enumerate(load(n_batches)):
            batches_done = n_batches * epoch + batch_i
            loss, outputs = model(imgs, targets)
            loss.backward()

            if batches_done % opt.gradient_accumulations:
                # Accumulates gradient before each step
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}  total loss {loss.item():.4f}")
