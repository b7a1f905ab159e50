import torch
import torch.nn as nn
from torch.optim.lr_scheduler import ExponentialLR

torch.manual_seed(0)


class SentimentNet(nn.Module):
    def __init__(self, vocab=50, dim=16):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, dim)
        self.fc = nn.Linear(dim, 2)

    def forward(self, tokens):
        return self.fc(torch.relu(self.embed(tokens)))


def make_reviews(n=320, length=12, vocab=50):
    label = torch.randint(0, 2, (n,))
    tokens = torch.randint(0, vocab, (n, length))
    hint = torch.randint(0, 10, (n, 4)) + label[:, None] * 10
    tokens[:, :4] = hint
    return tokens, label


def train(model, tokens, label, epochs=5, batch=64):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = ExponentialLR(optimizer, gamma=0.98)
    for epoch in range(epochs):
        running = 0.0
        for i in range(0, len(tokens), batch):
            x, y = tokens[i:i + batch], label[i:i + batch]
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            scheduler.step()
            running += loss.item()
        rate = optimizer.param_groups[0]["lr"]
        print(f"epoch {epoch} loss {running / (len(tokens) // batch):.4f} lr {rate:.4f}")


if __name__ == "__main__":
    train(SentimentNet(), *make_reviews())
