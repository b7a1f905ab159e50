import torch
import torch.nn as nn
from torch.optim.lr_scheduler import LambdaLR


class LinearDecayWithWarmup:
    """Linear warmup to the base rate, then linear decay to zero."""

    def __init__(self, optimizer, warmup_updates, max_updates, warmup_rate=1e-3):
        self.updates = 0
        self.warmup_updates = warmup_updates
        self.optimizer = optimizer

        def warm(step):
            start = warmup_rate
            return start + (1.0 - start) * min(1.0, step / max(1, warmup_updates))

        def decay(step):
            return max(0.0, 1.0 - step / (max_updates - warmup_updates))

        self.decay = LambdaLR(optimizer, decay)
        self.warmup = LambdaLR(optimizer, warm)

    def is_warming_up(self):
        return self.updates < self.warmup_updates

    def step(self):
        self.updates += 1
        if self.is_warming_up():
            self.warmup.step()
        else:
            self.decay.step()


def make_data(n=4000, vocab=40, classes=6):
    table = torch.randn(vocab, classes)
    tokens = torch.randint(0, vocab, (n, 7))
    scores = table[tokens].mean(1) + 0.25 * torch.randn(n, classes)
    return tokens, scores.argmax(1)


class Ranker(nn.Module):
    def __init__(self, vocab=40, dim=32, classes=6):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim)
        self.out = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, classes))

    def forward(self, tokens):
        return self.out(self.emb(tokens))


def main(total=500, batch=16):
    torch.manual_seed(0)
    tokens, labels = make_data()
    model = Ranker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    scheduler = LinearDecayWithWarmup(optimizer, warmup_updates=25, max_updates=total)
    criterion = nn.CrossEntropyLoss()

    running = 0.0
    for update in range(1, total + 1):
        idx = torch.randint(0, len(tokens), (batch,))
        loss = criterion(model(tokens[idx]), labels[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        running += loss.item()
        if update % 100 == 0:
            print(f"update {update}  loss {running / 100:.4f}  lr {optimizer.param_groups[0]['lr']:.4f}")
            running = 0.0


if __name__ == "__main__":
    main()
