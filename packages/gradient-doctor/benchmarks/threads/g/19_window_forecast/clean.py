import torch
import torch.nn as nn

torch.manual_seed(37)


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.cell = nn.LSTM(1, hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, window):
        out, _ = self.cell(window)
        return self.head(out)


t = torch.arange(0, 60, 0.3)
series = torch.sin(t) + 0.5 * torch.sin(2.3 * t)
seq_len = 10

model = Forecaster()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(8):
    total, last_err, n = 0.0, 0.0, 0
    for start in range(0, len(series) - seq_len - 1, 2):
        window = series[start:start + seq_len].view(seq_len, 1)
        y_true = series[start + seq_len].view(1, 1)
        y_pred = model(window)
        loss = criterion(y_pred[-1:], y_true)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        last_err += (y_pred[-1] - y_true[0]).pow(2).item()
        n += 1
    print(f"epoch {epoch}  loss {total / n:.4f}  error of the forecast {last_err / n:.4f}")
