import torch
import torch.nn as nn

torch.manual_seed(0)


def blobs(n=240, classes=4):
    centres = torch.randn(classes, 2) * 3
    y = torch.randint(0, classes, (n,))
    x = centres[y] + 0.6 * torch.randn(n, 2)
    return x, y


def accuracy(y_true, y_pred):
    return (y_true == y_pred).float().mean().item() * 100


class BlobModel(nn.Module):
    def __init__(self, n_in=2, n_out=4, hidden=16):
        super().__init__()
        self.stack = nn.Sequential(
            nn.Linear(n_in, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, n_out))

    def forward(self, x):
        return self.stack(x)


x_train, y_train = blobs()
model = BlobModel()
loss_fn = nn.CrossEntropyLoss()
optimiser = torch.optim.SGD(model.parameters(), lr=0.3)

for epoch in range(25):
    model.train()
    logits = model(x_train)
    preds = torch.softmax(logits, dim=1).argmax(dim=1)
    loss = loss_fn(preds.float(), y_train.float())
    acc = accuracy(y_train, preds)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if epoch % 5 == 0:
        print(f"epoch {epoch} | loss {loss.item():.4f} | acc {acc:.1f}%")
