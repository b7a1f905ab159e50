import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
N_CLASS, SIZE = 4, 8
prototypes = torch.randn(N_CLASS, 1, SIZE, SIZE)


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(32 * 16, N_CLASS)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def batch(n=48):
    y = torch.randint(0, N_CLASS, (n,))
    return 4.0 + 2.0 * (prototypes[y] + 0.8 * torch.randn(n, 1, SIZE, SIZE)), y


def invert_trigger(model, images, target, steps=4):
    model.eval()
    mask = torch.full((1, SIZE, SIZE), -2.0, requires_grad=True)
    pattern = torch.zeros(1, SIZE, SIZE, requires_grad=True)
    opt = torch.optim.Adam([mask, pattern], lr=0.5)
    labels = torch.full((len(images),), target)
    for _ in range(steps):
        m = torch.sigmoid(mask)
        stamped = (1 - m) * images + m * (4.0 + pattern)
        cost = F.cross_entropy(model(stamped), labels) + 0.01 * m.sum()
        opt.zero_grad()
        cost.backward()
        opt.step()
    return torch.sigmoid(mask).detach(), (4.0 + pattern).detach()


def local_training(model, rounds=60, lr=0.01):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    for r in range(1, rounds + 1):
        images, labels = batch()
        m, pattern = invert_trigger(model, images, target=r % N_CLASS)
        hardened = images.clone()
        hardened[:12] = (1 - m) * images[:12] + m * pattern
        loss = F.cross_entropy(model(hardened), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if r % 12 == 0:
            bn = model.features[1]
            print(f"round {r}  loss {loss.item():.4f}  mean of the first batch norm {bn.running_mean.mean().item():.3f}")


def test(model):
    model.train(False)
    with torch.no_grad():
        x, y = batch(500)
        return (model(x).argmax(1) == y).float().mean().item()


model = SmallNet()
local_training(model)
print(f"test accuracy {test(model):.3f}")
