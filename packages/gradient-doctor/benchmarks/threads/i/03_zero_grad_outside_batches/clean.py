import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)


def make_data(n=1024, dim=20, classes=5):
    centers = torch.randn(classes, dim) * 1.2
    y = torch.randint(0, classes, (n,))
    x = centers[y] + torch.randn(n, dim)
    return TensorDataset(x, y)


class Net(nn.Module):
    def __init__(self, dim=20, hidden=64, classes=5):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, classes)

    def forward(self, x):
        h = self.features(x)
        return self.out(h), h


def correlation_penalty(h):
    h = h - h.mean(dim=0)
    cov = h.t() @ h / h.size(0)
    return (cov - torch.diag(cov.diagonal())).pow(2).mean()


def train(model, loader, optimizer, epoch):
    model.train()
    running = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        logits, h = model(x)
        loss = F.cross_entropy(logits, y) + 0.1 * correlation_penalty(h)
        loss.backward()
        optimizer.step()
        running += loss.item() * x.size(0)
    print(f"epoch {epoch}: train loss {running / len(loader.dataset):.4f}")


def main():
    loader = DataLoader(make_data(), batch_size=32, shuffle=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(8):
        train(model, loader, optimizer, epoch)


if __name__ == "__main__":
    main()
