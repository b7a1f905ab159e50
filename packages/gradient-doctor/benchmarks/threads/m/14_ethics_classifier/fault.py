import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
VOCAB, LEN = 200, 12


class SentenceClassifier(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.drop = nn.Dropout(0.5)
        self.fc1 = nn.Linear(dim, 64)
        self.fc2 = nn.Linear(64, 1)

    def forward(self, ids):
        h = self.drop(self.emb(ids).mean(1))
        return self.fc2(self.drop(torch.relu(self.fc1(h)))).squeeze(-1)


def make_split(n, weights):
    ids = torch.randint(0, VOCAB, (n, LEN))
    y = (weights[ids].sum(1) + torch.randn(n) > 0).float()
    return ids, y


def train(model, optimizer, data, epoch, batch_size=16):
    ids, y = data
    order = torch.randperm(len(y))
    total = 0.0
    for i in range(0, len(y), batch_size):
        idx = order[i:i + batch_size]
        loss = F.binary_cross_entropy_with_logits(model(ids[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(idx)
    print(f"epoch {epoch} train loss {total / len(y):.4f}", end="  ")


def evaluate(model, data):
    model.eval()
    with torch.no_grad():
        logits = model(data[0])
        loss = F.binary_cross_entropy_with_logits(logits, data[1]).item()
        acc = ((logits > 0).float() == data[1]).float().mean().item()
    print(f"test loss {loss:.4f} acc {acc:.3f}")


def main():
    weights = torch.randn(VOCAB)
    train_data, test_data = make_split(320, weights), make_split(500, weights)
    model = SentenceClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for epoch in range(1, 13):
        train(model, optimizer, train_data, epoch)
        evaluate(model, test_data)


main()
