import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class PointNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.feat = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Sequential(
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.4), nn.Linear(32, classes))

    def forward(self, pts):
        return self.head(self.feat(pts.transpose(1, 2)).amax(dim=2))


def clouds(y, points=48):
    p = F.normalize(torch.randn(len(y), points, 3), dim=-1)
    stretch = torch.tensor([[1, 1, 1], [1, 1, 0.4], [1, 0.4, 0.4], [0.6, 1.3, 1]])
    return p * stretch[y].unsqueeze(1) + 0.03 * torch.randn(len(y), points, 3)


def train_one_epoch(model, optimizer, batches):
    model.train()
    total = 0.0
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(batches)


def eval_one_epoch(model, batches):
    model.train()
    correct = count = 0
    with torch.no_grad():
        for x, y in batches:
            correct += (model(x).argmax(1) == y).sum().item()
            count += len(y)
    return correct / count


def batch_list(labels):
    return [(clouds(y), y) for y in labels]


train_set = batch_list(torch.randint(0, 4, (20, 16)))
test_set = batch_list(torch.arange(4).repeat_interleave(4 * 8).view(16, 8))
model = PointNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(10):
    loss = train_one_epoch(model, optimizer, train_set)
    acc = eval_one_epoch(model, test_set)
    print(f"epoch {epoch}: train loss {loss:.4f}  test acc {acc:.3f}")
