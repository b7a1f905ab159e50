import torch
import torch.nn as nn

torch.manual_seed(0)


class ClosedCell(nn.Module):
    """A small gated continuous-time cell, run over a window."""

    def __init__(self, n_in=2, width=17):
        super().__init__()
        self.width = width
        self.back = nn.Linear(n_in + width, 24)
        self.go = nn.Linear(24, width)
        self.gate = nn.Linear(24, width)
        self.out = nn.Linear(width, 1)

    def forward(self, window, hx):
        outs = []
        for t in range(window.shape[1]):
            h = torch.tanh(self.back(torch.cat([window[:, t], hx], 1)))
            gate = torch.sigmoid(self.gate(h))
            hx = gate * torch.tanh(self.go(h)) + (1 - gate) * hx
            outs.append(self.out(hx))
        return torch.cat(outs, 1), hx


def stream(batch=16, length=400):
    t = torch.arange(length) * 0.15
    phase = torch.rand(batch, 1) * 6.28
    wave = torch.sin(t + phase)
    return torch.stack([wave, torch.sin(0.3 * t + phase)], -1), torch.roll(wave, -3, 1)


def train(window=10, epochs=2):
    model = ClosedCell()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs, targets = stream()
    for epoch in range(epochs):
        hx = torch.zeros(len(inputs), model.width)
        for start in range(0, inputs.shape[1] - window, window):
            x = inputs[:, start : start + window]
            y = targets[:, start : start + window]
            pred, hx = model(x, hx)
            loss = nn.functional.mse_loss(pred, y)
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


train()
