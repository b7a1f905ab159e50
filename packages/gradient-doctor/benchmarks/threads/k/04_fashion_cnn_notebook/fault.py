import torch
from torch import nn

torch.manual_seed(42)


class FashionModel(nn.Module):
    def __init__(self, in_channels, hidden, classes):
        super().__init__()
        self.block_1 = nn.Sequential(
            nn.Conv2d(in_channels, hidden, 3, padding=1), nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(hidden * 7 * 7, classes))

    def forward(self, x):
        return self.classifier(self.block_1(x))


def accuracy(logits, labels):
    return (logits.argmax(dim=1) == labels).float().mean().item() * 100


def train_step(model, images, labels, loss_fn, optimizer):
    model.train()
    total_loss, total_acc, batches = 0.0, 0.0, 0
    for x, y in zip(images.split(32), labels.split(32)):
        logits = model(x)
        loss = loss_fn(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
        total_acc += accuracy(logits, y)
        batches += 1
    print(f"train loss {total_loss / batches:.4f} | train acc {total_acc / batches:.1f}%")


# data: ten noisy prototypes
prototypes = torch.randn(10, 1, 14, 14)
labels = torch.randint(0, 10, (480,))
images = prototypes[labels] + 0.4 * torch.randn(480, 1, 14, 14)

model_2 = FashionModel(in_channels=1, hidden=10, classes=10)
print(sum(p.numel() for p in model_2.parameters()), "parameters")

loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(params=model_2.parameters(), lr=0.1)

# fresh weights for the real run
torch.manual_seed(42)
model_2 = FashionModel(in_channels=1, hidden=10, classes=10)

for epoch in range(5):
    train_step(model_2, images, labels, loss_fn, optimizer)
