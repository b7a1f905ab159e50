import torch
import torch.nn as nn

torch.manual_seed(0)


class QuestionEncoder(nn.Module):
    def __init__(self, vocab=60, dim=16, hidden=24, classes=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True)
        self.attn = nn.Sequential(nn.Linear(hidden + dim, 16), nn.Tanh(), nn.Linear(16, 1))
        self.hidden2tag = nn.Linear(hidden + dim, classes)

    def forward(self, tokens):
        x = self.embed(tokens)
        outputs, _ = self.lstm(x)
        joined = torch.cat([x, outputs], dim=2)
        weights = torch.softmax(self.attn(joined), dim=1)
        pooled = (weights * joined).sum(dim=1)
        return self.hidden2tag(pooled)


def questions(n=96, length=20, classes=6):
    label = torch.randint(0, classes, (n,))
    tokens = torch.randint(10, 60, (n, length))
    where = torch.randint(0, length, (n,))
    tokens[torch.arange(n), where] = label
    return tokens, label


def train(model, steps=30):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    criterion = nn.CrossEntropyLoss()
    for step in range(steps):
        tokens, label = questions()
        scores = model(tokens)
        loss = criterion(scores, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == steps - 1:
            acc = (scores.argmax(1) == label).float().mean().item()
            print(f"step {step:2d} loss {loss.item():.4f} acc {acc:.2f}")


train(QuestionEncoder())
