import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
CLASSES, CHANNELS, WINDOW = 6, 9, 64


def sensor_windows(n):
    y = torch.randint(0, CLASSES, (n,))
    t = torch.arange(WINDOW).float() / WINDOW
    freq = 1.0 + y.float()
    phase = torch.rand(n, 1, 1) * 6.28
    wave = torch.sin(6.28 * freq[:, None, None] * t + phase)
    gain = torch.linspace(0.3, 1.0, CHANNELS)[None, :, None]
    return gain * wave + 0.2 * torch.randn(n, CHANNELS, WINDOW), y


class ActivityCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(CHANNELS, 24, kernel_size=9, padding=4)
        self.conv2 = nn.Conv1d(24, 32, kernel_size=9, padding=4)
        self.pool = nn.MaxPool1d(2)
        self.fc1 = nn.Linear(32 * WINDOW // 4, 64)
        self.fc2 = nn.Linear(64, CLASSES)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


x, y = sensor_windows(600)
loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
model = ActivityCNN()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

for epoch in range(12):
    model.train()
    total, hits = 0.0, 0
    for xb, yb in loader:
        out = model(xb)
        loss = criterion(out, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(xb)
        hits += (out.argmax(1) == yb).sum().item()
    if epoch % 2 == 1:
        print(f"epoch {epoch:2d} loss {total / len(x):.4f} acc {hits / len(x):.3f}")
