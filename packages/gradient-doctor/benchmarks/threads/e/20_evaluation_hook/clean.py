import math
import torch
from torch import nn

torch.manual_seed(0)


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(49, 48), nn.ReLU(), nn.Linear(48, 6))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch):
        x, y = batch
        guess = self(x).argmax(1)
        hits = (guess == y).sum().item()
        found = (guess == 5).sum().item()
        return {"acc": hits / len(y), "precision_of_5": ((guess == 5) & (y == 5)).sum().item() / found}


class Loop:
    def __init__(self, module, lr=0.05, val_every=1):
        self.module, self.val_every = module, val_every
        self.optimizer = torch.optim.SGD(module.parameters(), lr=lr)

    def evaluate(self, loader):
        self.module.eval()
        with torch.no_grad():
            outputs = [self.module.validation_step(batch) for batch in loader]
        self.module.train()
        return {k: round(sum(o[k] for o in outputs) / len(outputs), 3) for k in outputs[0]}

    def fit(self, train_loader, val_loader, epochs):
        for epoch in range(epochs):
            running = 0.0
            for batch in train_loader:
                loss = self.module.training_step(batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                running += loss.item()
            line = f"epoch {epoch} train {running / len(train_loader):.3f}"
            if epoch % self.val_every == 0:
                try:
                    line += f" val {self.evaluate(val_loader)}"
                except ZeroDivisionError:
                    line += " val metrics not defined yet"
            print(line)


glyphs = (torch.rand(6, 7, 7) > 0.5).float()
skew = torch.tensor([0.25, 0.25, 0.2, 0.15, 0.1, 0.05])


def loader(batches, bs=32):
    out = []
    for _ in range(batches):
        y = torch.multinomial(skew, bs, replacement=True)
        out.append((glyphs[y] + 0.5 * torch.randn(bs, 7, 7), y))
    return out


Loop(Digits()).fit(loader(12), loader(3, bs=200), epochs=12)
