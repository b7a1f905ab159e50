import torch
import torch.nn as nn

torch.manual_seed(0)


class SharedNet(nn.Module):
    def __init__(self, n_in=8, hidden=32, classes=5):
        super().__init__()
        self.stem = nn.Linear(n_in, hidden)
        self.body = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(self.body(x))
        return self.head(x)


def set_trainable(model, freeze_layers):
    for name, param in model.named_parameters():
        layer = name.split(".")[0]
        param.requires_grad = layer in freeze_layers


def task_data(n=200, n_in=8, classes=5):
    x = torch.randn(n, n_in)
    y = (x @ torch.randn(n_in, classes)).argmax(1)
    return x, y


def train_task(model, x, y, freeze_layers, steps=30):
    set_trainable(model, freeze_layers)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=0.02)
    for step in range(steps):
        scores = model(x)
        loss = nn.functional.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0 or step == steps - 1:
            acc = (scores.argmax(1) == y).float().mean().item()
            print(f"step {step:2d} loss {loss.item():.4f} acc {acc:.3f}")


if __name__ == "__main__":
    model = SharedNet()
    train_task(model, *task_data(), freeze_layers=["stem"])
