import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(7)
np.random.seed(7)
LOOKBACK = 20


def series(n):
    t = np.arange(n)
    return (np.sin(t / 5.0) + 0.5 * np.sin(t / 11.0) + 0.05 * np.random.randn(n)).astype("float32")


def windows(s):
    x = np.stack([s[i:i + LOOKBACK] for i in range(len(s) - LOOKBACK)])
    y = s[LOOKBACK:]
    return torch.from_numpy(x).unsqueeze(-1), torch.from_numpy(y)


class Forecaster(nn.Module):
    def __init__(self, hidden=24, pred_len=1):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, pred_len)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


def train(model, x, y, epochs=30, bs=64):
    criterion = nn.MSELoss()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(epochs):
        perm = torch.randperm(len(x))
        total = 0.0
        for i in range(0, len(x), bs):
            idx = perm[i:i + bs]
            x_batch, y_batch = x[idx], y[idx]
            pred = model(x_batch)
            loss = criterion(pred, y_batch.view_as(pred))
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(idx)
        if epoch % 5 == 4:
            print(f"epoch {epoch:2d} train mse {total / len(x):.4f}")


x, y = windows(series(520))
net = Forecaster()
train(net, x, y)
with torch.no_grad():
    err = (net(x).squeeze(1) - y).pow(2).mean()
print("mse on the training windows: %.4f, variance of y: %.4f" % (err, y.var()))
