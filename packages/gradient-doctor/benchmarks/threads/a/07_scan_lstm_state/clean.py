import torch
import torch.nn as nn

torch.manual_seed(0)


class ScanLSTM(nn.Module):
    def __init__(self, input_dim=10, hidden_dim=24, batch=32):
        super().__init__()
        self.hidden_dim = hidden_dim
        self.batch = batch
        self.lstm = nn.LSTM(input_dim, hidden_dim, num_layers=1, batch_first=True)
        self.dropout = nn.Dropout(p=0.2)
        self.linear = nn.Linear(hidden_dim, 1)
        self.hidden = self.init_hidden()

    def init_hidden(self):
        shape = (1, self.batch, self.hidden_dim)
        return torch.zeros(shape), torch.zeros(shape)

    def forward(self, x):
        lstm_out, self.hidden = self.lstm(x)
        out = self.dropout(lstm_out[:, -1, :])
        return torch.sigmoid(self.linear(out)).squeeze(1)


def scans(batch=32, frames=12, regions=10):
    label = torch.randint(0, 2, (batch,)).float()
    signal = torch.randn(batch, frames, regions)
    signal[:, :, :3] += (label * 2 - 1)[:, None, None] * 0.8
    return signal, label


def run_training(model, iterations=20):
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for it in range(iterations):
        x, y = scans()
        optimizer.zero_grad()
        prob = model(x)
        loss = criterion(prob, y)
        loss.backward()
        optimizer.step()
        if it % 5 == 0:
            acc = ((prob > 0.5).float() == y).float().mean().item()
            print(f"iteration {it} loss {loss.item():.4f} acc {acc:.2f}")


run_training(ScanLSTM())
