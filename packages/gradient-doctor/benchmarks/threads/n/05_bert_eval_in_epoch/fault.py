import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
VOCAB, LENGTH = 60, 12


def corpus(n):
    tokens = torch.randint(1, VOCAB, (n, LENGTH))
    score = (tokens < 20).sum(1) - (tokens > 40).sum(1)
    labels = (score + torch.randn(n) * 2 > 0).long()
    return tokens, labels


class Classifier(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(torch.randn(LENGTH, dim) * 0.1)
        self.encoder = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.4, batch_first=True)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(dim, 2)

    def forward(self, tokens):
        hidden = self.encoder(self.drop(self.embed(tokens) + self.position))
        return self.head(self.drop(hidden.mean(1)))


def evaluate(model, tokens, labels):
    model.eval()
    with torch.no_grad():
        logits = model(tokens)
    accuracy = (logits.argmax(1) == labels).float().mean()
    return F.cross_entropy(logits, labels).item(), accuracy.item()


def train_epoch(model, optimizer, tokens, labels, dev, display_steps=5):
    model.train()
    total, count = 0.0, 0
    for step, idx in enumerate(torch.randperm(len(tokens)).split(8), 1):
        loss = F.cross_entropy(model(tokens[idx]), labels[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, count = total + loss.item(), count + 1
        if step % display_steps == 0:
            dev_loss, dev_accuracy = evaluate(model, *dev)
    return total / count, dev_loss, dev_accuracy


train_set, dev_set = corpus(240), corpus(200)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(8):
    loss, dev_loss, dev_accuracy = train_epoch(model, optimizer, *train_set, dev_set)
    print(f"epoch {epoch}  train loss {loss:.3f}  dev loss {dev_loss:.3f}  dev accuracy {dev_accuracy:.3f}")
