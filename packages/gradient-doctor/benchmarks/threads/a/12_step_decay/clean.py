import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR

torch.manual_seed(0)


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool1d(4),
            nn.Flatten(), nn.Linear(8 * 8, 3))

    def forward(self, x):
        return self.net(x)


def waves(n):
    kind = torch.randint(0, 3, (n,))
    t = torch.linspace(0, 6.28, 32)
    freq = torch.tensor([1.0, 2.0, 4.0])[kind]
    x = torch.sin(freq[:, None] * t[None] + torch.rand(n, 1) * 0.5)
    return (x + 0.2 * torch.randn(n, 32)).unsqueeze(1), kind


class Trainer:
    def __init__(self, model, lr=0.02, decay_every=3):
        self.model = model
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.scheduler = StepLR(self.optimizer, step_size=decay_every, gamma=0.1)

    def run_epoch(self, x, y, batch_size=32):
        losses = []
        for start in range(0, len(x), batch_size):
            xb, yb = x[start:start + batch_size], y[start:start + batch_size]
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(xb), yb)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        self.scheduler.step()
        return sum(losses) / len(losses)


x, y = waves(192)
trainer = Trainer(SmallNet())
for epoch in range(4):
    loss = trainer.run_epoch(x, y)
    print(f"epoch {epoch} loss {loss:.4f} lr {trainer.scheduler.get_last_lr()[0]:.2e}")
