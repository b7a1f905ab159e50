import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def make_images(n, classes=10, size=8):
    prototypes = torch.randn(classes, 1, size, size)
    labels = torch.randint(0, classes, (n,))
    images = prototypes[labels] + 0.5 * torch.randn(n, 1, size, size)
    return images, labels


class DigitNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16 * 2 * 2, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        return self.fc(x)


def train(model, images, labels, epochs=5, batch_size=64):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        order = torch.randperm(len(images))
        total, correct = 0.0, 0
        for start in range(0, len(images), batch_size):
            idx = order[start:start + batch_size]
            scores = model(images[idx])
            loss = criterion(scores, labels[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(idx)
            correct += (scores.argmax(1) == labels[idx]).sum().item()
        print(f"epoch {epoch} loss {total / len(images):.4f} acc {correct / len(images):.3f}")


if __name__ == "__main__":
    x, y = make_images(384)
    train(DigitNet(), x, y)
