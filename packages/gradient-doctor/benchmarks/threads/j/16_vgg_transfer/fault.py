import copy
import torch
import torch.nn as nn


class SmallVGG(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, num_classes))

    def forward(self, x):
        return self.classifier(self.features(x))


def textures(n, n_classes, offset=0):
    y = torch.randint(0, n_classes, (n,))
    grid = torch.arange(16).float()
    freq = 0.4 + 0.35 * (y + offset)
    wave = torch.sin(freq[:, None, None] * (grid[None, :, None] + (y % 2)[:, None, None] * grid[None, None, :]))
    return wave[:, None].repeat(1, 3, 1, 1) + 0.3 * torch.randn(n, 3, 16, 16), y


def pretrain(model, steps=60):
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x, y = textures(64, 10)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"pretraining loss {loss.item():.3f}")


def finetune(vgg, n_classes=5, epochs=6):
    # Freeze training for all "features" layers
    for param in vgg.features.parameters():
        param.require_grad = False

    last = vgg.classifier[-1]
    vgg.classifier[-1] = nn.Linear(last.in_features, n_classes)
    backbone = copy.deepcopy(vgg.features.state_dict())

    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(vgg.parameters(), lr=0.004, momentum=0.9)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for _ in range(12):
            x, y = textures(20, n_classes, offset=3)
            optimizer.zero_grad()
            loss = criterion(vgg(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        drift = sum((v - backbone[k]).abs().sum().item() for k, v in vgg.features.state_dict().items())
        print(f"epoch {epoch}  loss {total / 12:.4f}  change of the features {drift:.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    net = SmallVGG()
    pretrain(net)
    finetune(net)
