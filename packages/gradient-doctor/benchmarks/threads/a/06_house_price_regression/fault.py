import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


def make_table(n=256, features=6):
    x = torch.randn(n, features)
    w = torch.tensor([1.5, -2.0, 0.7, 0.0, 1.1, -0.4])
    y = x @ w + 0.1 * torch.randn(n)
    return x, y


class PriceModel(nn.Module):
    def __init__(self, features=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.body(x)


def train_epoch(model, dl, opt, loss_func):
    model.train()
    total = 0.0
    for xb, yb in dl:
        loss = loss_func(model(xb), yb)
        loss.backward()
        opt.step()
        opt.zero_grad()
        total += loss.item()
    return total / len(dl)


def r2(model, x, y):
    with torch.no_grad():
        pred = model(x).flatten()
    return 1 - ((pred - y) ** 2).sum().item() / ((y - y.mean()) ** 2).sum().item()


x, y = make_table()
dl = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model = PriceModel()
opt = torch.optim.Adam(model.parameters(), lr=0.03)
for epoch in range(7):
    loss = train_epoch(model, dl, opt, nn.MSELoss())
    print(f"epoch {epoch} mse {loss:.3f} r2 {r2(model, x, y):.3f}")
