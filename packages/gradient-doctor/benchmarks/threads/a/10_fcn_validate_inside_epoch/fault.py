import torch
import torch.nn as nn

torch.manual_seed(0)


class TinyFCN(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
            nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
            nn.Dropout2d(0.3))
        self.score = nn.Conv2d(12, classes, 1)

    def forward(self, x):
        return self.score(self.features(x))


def batch(n=8, size=12):
    mask = torch.randint(0, 3, (n, size // 4, size // 4))
    mask = mask.repeat_interleave(4, 1).repeat_interleave(4, 2)
    image = 2.0 + nn.functional.one_hot(mask, 3).permute(0, 3, 1, 2).float() * 3
    return image + torch.randn(n, 3, size, size), mask


class Trainer:
    def __init__(self, model, interval_validate=4):
        self.model = model
        self.interval_validate = interval_validate
        self.criterion = nn.CrossEntropyLoss()
        self.optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def validate(self):
        self.model.eval()
        with torch.no_grad():
            x, y = batch(32)
            acc = (self.model(x).argmax(1) == y).float().mean()
        print(f"    validation pixel acc {acc.item():.3f}")

    def train_epoch(self, iterations=12):
        self.model.train()
        for it in range(iterations):
            if it % self.interval_validate == 1:
                self.validate()
            x, y = batch()
            self.optim.zero_grad()
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optim.step()
            print(f"  it {it:2d} loss {loss.item():.4f}")


trainer = Trainer(TinyFCN())
for epoch in range(2):
    print("epoch", epoch)
    trainer.train_epoch()
print("batches seen by batch norm:", trainer.model.features[1].num_batches_tracked.item())
