import torch
import torch.nn as nn

torch.manual_seed(0)


class Thermometer(nn.Module):
    """A reading is corrected for the place where it was taken."""

    def __init__(self, places=12, dtype=torch.float64):
        super().__init__()
        self.gain = nn.Linear(2, 1).to(dtype)
        self.offset = nn.Parameter(torch.zeros(places).to(dtype))

    def forward(self, reading, place):
        return self.gain(reading).squeeze(-1) + self.offset[place]


def readings(n=400, places=12):
    bias = torch.linspace(-2, 2, places, dtype=torch.float64)[torch.randperm(places)]
    place = torch.randint(0, places, (n,))
    reading = torch.randn(n, 2, dtype=torch.float64)
    true = 1.5 * reading[:, 0] - 0.5 * reading[:, 1] + bias[place]
    return reading, place, true


def train(epochs=25, batch=50):
    reading, place, true = readings()
    model = Thermometer()
    print("parameters:", [name for name, _ in model.named_parameters()])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        total = 0.0
        for i in range(0, len(true), batch):
            rows = slice(i, i + batch)
            loss = (model(reading[rows], place[rows]) - true[rows]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * batch / len(true)
        if epoch % 5 == 0 or epoch == epochs - 1:
            largest = model.offset.detach().abs().max().item()
            print(f"epoch {epoch:2d} loss {total:.4f} largest offset {largest:.3f}")


train()
