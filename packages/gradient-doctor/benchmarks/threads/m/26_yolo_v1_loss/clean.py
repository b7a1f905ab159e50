import torch
import torch.nn as nn

torch.manual_seed(0)
S, C = 4, 3


class YoloLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.mse = nn.MSELoss(reduction="sum")
        self.lambda_noobj, self.lambda_coord = 0.5, 5.0

    def forward(self, predictions, target):
        predictions = predictions.reshape(-1, S, S, C + 5)
        exists = target[..., C:C + 1]
        box_pred = exists * predictions[..., C + 1:C + 5]
        box_target = exists * target[..., C + 1:C + 5]
        wh = torch.sign(box_pred[..., 2:]) * torch.sqrt(box_pred[..., 2:].abs() + 1e-6)
        box_pred = torch.cat([box_pred[..., :2], wh], dim=-1)
        box_target = torch.cat([box_target[..., :2], box_target[..., 2:].sqrt()], dim=-1)
        box_loss = self.mse(box_pred, box_target)
        object_loss = self.mse(exists * predictions[..., C:C + 1], exists)
        no_object_loss = self.mse((1 - exists) * predictions[..., C:C + 1], torch.zeros_like(exists))
        class_loss = self.mse(exists * predictions[..., :C], exists * target[..., :C])
        total = self.lambda_coord * box_loss + object_loss + self.lambda_noobj * no_object_loss + class_loss
        return total / len(target)


class TinyYolo(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.LeakyReLU(0.1),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.LeakyReLU(0.1),
            nn.Flatten(), nn.Linear(32 * 16, 64), nn.LeakyReLU(0.1), nn.Linear(64, S * S * (C + 5)))

    def forward(self, x):
        return self.net(x)


def scenes(batch):
    image, target = 0.1 * torch.randn(batch, 3, 16, 16), torch.zeros(batch, S, S, C + 5)
    for b in range(batch):
        i, j = torch.randint(0, S, (2,)).tolist()
        c = int(torch.randint(0, C, (1,)))
        image[b, c, 4 * i:4 * i + 4, 4 * j:4 * j + 4] += 1.0
        target[b, i, j, c] = 1.0
        target[b, i, j, C:] = torch.tensor([1.0, 0.5, 0.5, 1.0, 1.0])
    return image, target


model, loss_fn = TinyYolo(), YoloLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.9, weight_decay=1e-4)
for step in range(100):
    x, y = scenes(batch=64)
    loss = loss_fn(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19 or step < 2:
        print(f"step {step + 1}: loss {loss.item():.4f}")
