import torch
from torch import nn

torch.manual_seed(11)


class Gate(nn.Module):
    """Lets only readings above a learned level pass."""

    def __init__(self, channels):
        super().__init__()
        self.level = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        passed = torch.sigmoid(8.0 * (x - self.level))
        return x * passed


class SensorModel(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.gate = Gate(channels)
        self.read = nn.Linear(channels, 1)

    def forward(self, x):
        return self.read(self.gate(x)).squeeze(-1)


C = 4
x = 3 * torch.rand(512, C)
weights = torch.tensor([1.0, -2.0, 1.2, 1.5])
y = (x * (x > 1.5).float()) @ weights + 0.05 * torch.randn(512)

model = SensorModel(C)
opt = torch.optim.Adam(model.parameters(), lr=0.02)
loss_fn = nn.MSELoss()

for it in range(600):
    opt.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    opt.step()
    if it % 100 == 0 or it == 599:
        level = [round(v, 2) for v in model.gate.level.tolist()]
        print(f"it {it:3d}  loss {loss.item():.4f}  level {level}")
