import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


class ExponentialMovingAverage:
    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self):
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.shadow[name].mul_(self.decay).add_(p, alpha=1 - self.decay)

    def apply_shadow(self):
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.shadow[name])


class BoxHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.SiLU(),
                                  nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.SiLU())
        self.box = nn.Linear(8 * 16, 4)

    def forward(self, x):
        return torch.sigmoid(self.box(self.conv(x).flatten(1)))


class ModelTrainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        self.ema = ExponentialMovingAverage(model)

    def train_one_batch(self, images, boxes):
        self.optimizer.zero_grad()
        loss = F.smooth_l1_loss(self.model(images), boxes, beta=0.1)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save_checkpoint(self, epoch):
        self.ema.apply_shadow()
        return {"epoch": epoch, "model": copy.deepcopy(self.model.state_dict())}

    def solve(self, images, boxes, epochs=6):
        for epoch in range(epochs):
            losses = [self.train_one_batch(x, y) for x, y in zip(images.split(32), boxes.split(32))]
            self.save_checkpoint(epoch)
            with torch.no_grad():
                error = (self.model(images) - boxes).abs().mean().item()
            print(f"epoch {epoch}  loss {sum(losses) / len(losses):.4f}  box error of the checkpoint {error:.4f}")


def squares(n):
    images, boxes = torch.zeros(n, 1, 16, 16), torch.zeros(n, 4)
    for i in range(n):
        w, h = torch.randint(3, 8, (2,)).tolist()
        x, y = int(torch.randint(0, 16 - w, (1,))), int(torch.randint(0, 16 - h, (1,)))
        images[i, 0, y:y + h, x:x + w] = 1.0
        boxes[i] = torch.tensor([x, y, x + w, y + h]) / 16
    return images, boxes


torch.manual_seed(0)
ModelTrainer(BoxHead()).solve(*squares(512))
