import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class PairClassifier(nn.Module):
    def __init__(self, vocab=60, width=24):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, width)
        self.classifier = nn.Sequential(nn.Linear(2 * width, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, first, second):
        a, b = self.embed(first), self.embed(second)
        return self.classifier(torch.cat([a * b, (a - b).abs()], 1))


def pairs(n=160, length=8, vocab=60):
    label = torch.randint(0, 2, (n,))
    first = torch.randint(0, vocab, (n, length))
    other = torch.randint(0, vocab, (n, length))
    shuffled = first[:, torch.randperm(length)]
    return TensorDataset(first, torch.where(label[:, None] == 1, shuffled, other), label)


def train(model, dataset, epochs=30, batch=16, gradient_accumulation_steps=16):
    loader = DataLoader(dataset, batch_size=batch, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    global_step = 0
    model.zero_grad()
    for epoch in range(epochs):
        total = 0.0
        for step, (first, second, label) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(first, second), label)
            total += loss.item() / len(loader)
            loss = loss / gradient_accumulation_steps
            loss.backward()
            if (step + 1) % gradient_accumulation_steps == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                model.zero_grad()
                global_step += 1
        if epoch % 5 == 0 or epoch == epochs - 1:
            print(f"epoch {epoch:2d} loss {total:.4f} global step {global_step}")


train(PairClassifier(), pairs())
