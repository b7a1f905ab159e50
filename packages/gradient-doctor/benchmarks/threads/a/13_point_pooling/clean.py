import torch
import torch.nn as nn

torch.manual_seed(0)


class SortPool(nn.Module):
    """Keeps the strongest points per feature and mixes them."""

    def __init__(self, features=16, keep=8):
        super().__init__()
        self.features = features
        self.keep = keep
        self.mix = nn.Conv1d(features, features, kernel_size=keep)

    def forward(self, x):
        top, _ = x.sort(dim=2, descending=True)
        top = top[:, :, :self.keep]
        return torch.relu(self.mix(top)).squeeze(2)


class CloudNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.point = nn.Sequential(nn.Conv1d(3, 16, 1), nn.ReLU(), nn.Conv1d(16, 16, 1))
        self.pool = SortPool()
        self.head = nn.Linear(16, classes)

    def forward(self, cloud):
        return self.head(self.pool(self.point(cloud)))


def clouds(n=48, points=40):
    kind = torch.randint(0, 4, (n,))
    scale = torch.tensor([[1, 1, 1], [3, 1, 1], [1, 3, 1], [1, 1, 3.0]])[kind]
    return torch.randn(n, 3, points) * scale[:, :, None], kind


def train(steps=30):
    net = CloudNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    for step in range(steps):
        cloud, kind = clouds()
        scores = net(cloud)
        loss = criterion(scores, kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == steps - 1:
            acc = (scores.argmax(1) == kind).float().mean().item()
            print(f"step {step:2d} loss {loss.item():.4f} acc {acc:.2f}")


train()
