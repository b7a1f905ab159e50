import math
import torch
from torch import nn

torch.manual_seed(0)
SEQ, BATCH, EMB, HID = 12, 16, 6, 24


class Sequencer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(EMB, HID, num_layers=1, batch_first=True)
        self.head = nn.Linear(HID, EMB)

    def forward(self, x, h, c):
        y, (h, c) = self.lstm(x, (h, c))
        return self.head(y), (h, c)


def batches(count):
    freq = torch.linspace(0.5, 1.5, EMB)
    for _ in range(count):
        t0 = torch.rand(BATCH, 1, 1) * 2 * math.pi
        t = t0 + 0.4 * torch.arange(SEQ + 1).view(1, -1, 1)
        wave = torch.sin(t * freq)
        yield wave[:, :-1], wave[:, 1:]


model = Sequencer()
loss_fn = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(2):
    h0 = torch.randn(1, BATCH, HID)
    c0 = torch.randn(1, BATCH, HID)
    for number, (x, y) in enumerate(batches(30), start=1):
        optimizer.zero_grad()
        output, (h0, c0) = model(x, h0.detach(), c0.detach())
        loss = loss_fn(output.reshape(-1, EMB), y.reshape(-1, EMB))
        loss.backward(retain_graph=True)
        optimizer.step()
        if number % 10 == 0:
            print(f"epoch {epoch} : batch {number} : {loss.item():.4f}")
