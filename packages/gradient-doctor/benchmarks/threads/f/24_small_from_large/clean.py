import torch
import torch.nn as nn
import torch.nn.functional as F


class Distillation:
    """Train a small network on the soft answers of a large one plus the given labels."""

    def __init__(self, large, small, temperature=3.0, soft_weight=20.0, label_weight=0.5):
        self.large, self.small = large, small
        self.T = temperature
        self.soft_weight, self.label_weight = soft_weight, label_weight
        self.kl_div = nn.KLDivLoss(reduction="batchmean")
        self.ce = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(small.parameters(), lr=3e-3)

    def step(self, data, target):
        with torch.no_grad():
            large_logits = self.large(data)
        output = self.small(data)

        soft_targets = F.softmax(large_logits / self.T, dim=-1)
        log_probs = F.log_softmax(output / self.T, dim=-1)
        soft_loss = self.kl_div(log_probs, soft_targets)
        label_loss = self.ce(output, target)
        loss = self.soft_weight * soft_loss + self.label_weight * label_loss

        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return soft_loss.item(), label_loss.item()


def spirals(n, classes=3):
    y = torch.randint(0, classes, (n,))
    r = torch.rand(n) * 2 + 0.2
    angle = 2.2 * r + y * 6.2832 / classes
    return torch.stack([r * angle.cos(), r * angle.sin()], 1), y


def mlp(width):
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def pretrain(model, steps=200):
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        x, y = spirals(128)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return model.eval()


def right(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


torch.manual_seed(12)
large, small = pretrain(mlp(64)), mlp(20)
test = spirals(1000)
print(f"large model {right(large, *test):.3f}")
trainer = Distillation(large, small)
for i in range(1, 601):
    x, y = spirals(48)
    poor = torch.rand(48) < 0.5  # half of the labels at hand are poor
    y = torch.where(poor & (x.norm(dim=1) > 1.0), (y + 1) % 3, y)
    soft, label = trainer.step(x, y)
    if i % 100 == 0:
        print(f"step {i} soft {soft:.4f} label {label:.3f} small model {right(small, *test):.3f}")
