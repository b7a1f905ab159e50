import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(20)
POINTS, FEAT, REGIONS, CLASSES = 48, 12, 6, 4


class SoftPool(nn.Module):
    def __init__(self, regions=REGIONS, keep=8):
        super().__init__()
        self.regions, self.keep = regions, keep
        self.score = nn.Conv1d(FEAT, regions, 1)

    def forward(self, x):
        weight = self.score(x)
        cabins = []
        for r in range(self.regions):
            top = weight[:, r].topk(self.keep, dim=-1)
            picked = x.gather(2, top.indices.unsqueeze(1).expand(-1, FEAT, -1))
            cabins.append(picked * torch.sigmoid(top.values).unsqueeze(1))
        pooled = torch.stack(cabins, dim=2)
        conv1 = nn.Conv2d(FEAT, 24, kernel_size=(1, 3))
        conv2 = nn.Conv2d(24, 24, kernel_size=(1, self.keep - 2))
        return conv2(torch.relu(conv1(pooled))).flatten(1)


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Conv1d(3, FEAT, 1), nn.ReLU(), nn.Conv1d(FEAT, FEAT, 1))
        self.pool = SoftPool()
        self.cls = nn.Linear(24 * REGIONS, CLASSES)

    def forward(self, pts):
        return self.cls(torch.relu(self.pool(self.embed(pts))))


def clouds(n=32):
    label = torch.randint(CLASSES, (n,))
    stretch = torch.tensor([[2.0, 0.3, 0.3], [0.3, 2.0, 0.3], [0.3, 0.3, 2.0], [1.0, 1.0, 1.0]])[label]
    return torch.randn(n, 3, POINTS) * stretch.unsqueeze(-1), label


def main():
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(30):
        pts, label = clouds()
        loss = F.cross_entropy(model(pts), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == 29:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
