import torch
import torch.nn as nn

torch.manual_seed(0)


class EdgeSeg(nn.Module):
    def __init__(self, classes=3, width=12):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.PReLU(width)
        )
        self.decoder = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        return self.decoder(self.encoder(x))


def streets(n=24, size=12):
    label = torch.zeros(n, size, size, dtype=torch.long)
    for i in range(n):
        horizon = torch.randint(3, 9, (1,)).item()
        label[i, horizon:] = 1
        label[i, horizon:, 4:8] = 2
    colours = torch.tensor([[0.2, 0.4, 0.9], [0.3, 0.7, 0.2], [0.5, 0.5, 0.5]])
    picture = colours[label].permute(0, 3, 1, 2) + 0.2 * torch.randn(n, 3, size, size)
    return picture, label


def train_epoch(model, batches, criterion, optimizer):
    model.train()
    total, right = 0.0, 0.0
    for picture, label in batches:
        output = model(picture)
        loss = criterion(output, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        right += (output.argmax(1) == label).float().mean().item()
    return total / len(batches), right / len(batches)


def main(epochs=6):
    batches = [streets() for _ in range(8)]
    model = EdgeSeg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=4e-5)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        loss, accuracy = train_epoch(model, batches, criterion, optimizer)
        print(f"epoch {epoch} loss {loss:.4f} pixel accuracy {accuracy:.3f}")


main()
