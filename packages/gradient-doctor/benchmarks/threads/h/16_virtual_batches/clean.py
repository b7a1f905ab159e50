import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)
SITES, PER_SITE, DIM = 4, 64, 10


def site_data(k):
    """Every clinic sees other kinds of patients and other classes."""
    centre = torch.zeros(DIM)
    centre[k] = 2.5
    x = torch.randn(PER_SITE, DIM) + centre
    y = torch.full((PER_SITE,), k)
    return x, y


class ClinicNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, SITES))

    def forward(self, x):
        return self.net(x)


def micro_batches(data, size=32):
    for i in range(0, PER_SITE, size):
        for x, y in data:
            yield x[i:i + size], y[i:i + size]


def train_epoch(model, opt, data, accumulate=SITES):
    losses = []
    for i, (x, y) in enumerate(micro_batches(data)):
        loss = F.cross_entropy(model(x), y) / accumulate
        loss.backward()
        losses.append(loss.item() * accumulate)
        if (i + 1) % accumulate == 0:
            opt.step()
            opt.zero_grad()
    return sum(losses) / len(losses)


data = [site_data(k) for k in range(SITES)]
model = ClinicNet()
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for epoch in range(30):
    mean_loss = train_epoch(model, opt, data)
    if epoch % 5 == 4:
        with torch.no_grad():
            acc = [(model(x).argmax(1) == y).float().mean().item() for x, y in data]
        print(f"epoch {epoch} loss {mean_loss:.4f} acc per site", [round(a, 2) for a in acc])
