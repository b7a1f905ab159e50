import torch
import torch.nn as nn

torch.manual_seed(0)


class GlyphReader(nn.Module):
    """Which of the symbols is in each picture."""

    def __init__(self, pixels=16, symbols=5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(pixels, 32), nn.ReLU(), nn.Linear(32, symbols))

    def forward(self, pictures):
        return self.net(pictures)


class WordScorer(nn.Module):
    def __init__(self, symbols=5, width=16, length=3):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.net = nn.Sequential(nn.Linear(width * length, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, symbols):
        return self.net(self.embed(symbols).flatten(1))


SHAPES = torch.randn(5, 16)


def words(n=128):
    spelled = torch.randint(0, 5, (n, 3))
    pictures = SHAPES[spelled] + 0.8 * torch.randn(n, 3, 16)
    return pictures, (spelled.sum(1) > 6).long()


def train(steps=150):
    reader, scorer = GlyphReader(), WordScorer()
    optimizer = torch.optim.Adam([*reader.parameters(), *scorer.parameters()], lr=5e-3)
    for step in range(steps):
        pictures, valid = words()
        symbols = reader(pictures).argmax(dim=-1)
        logits = scorer(symbols)
        loss = nn.functional.cross_entropy(logits, valid)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0 or step == steps - 1:
            grad = reader.net[0].weight.grad
            size = "None" if grad is None else f"{grad.norm().item():.4f}"
            print(f"step {step:3d} loss {loss.item():.4f} gradient of the reader {size}")


train()
