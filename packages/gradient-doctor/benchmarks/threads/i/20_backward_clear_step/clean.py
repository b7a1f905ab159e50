import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(20)


class LinearWarmup:
    """Dampens the learning rates of the groups during the first steps."""

    def __init__(self, optimizer, period):
        self.optimizer, self.period, self.count = optimizer, period, 0
        self.base = [g["lr"] for g in optimizer.param_groups]
        self.apply()

    def apply(self):
        factor = min(1.0, (self.count + 1) / self.period)
        for group, lr in zip(self.optimizer.param_groups, self.base):
            group["lr"] = lr * factor

    def step(self):
        self.count += 1
        self.apply()


class Net(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16 * 4, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def letters(n, glyphs):
    y = torch.randint(0, len(glyphs), (n,))
    return glyphs[y] + 0.4 * torch.randn(n, 1, 8, 8), y


glyphs = torch.randn(6, 1, 8, 8).sign()
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
warmup_scheduler = LinearWarmup(optimizer, period=20)

model.train()
for step in range(150):
    x, y = letters(64, glyphs)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup_scheduler.step()
    if step % 25 == 0 or step == 149:
        print(f"step {step:3d}  lr {optimizer.param_groups[0]['lr']:.5f}  loss {loss.item():.4f}")
