import torch
import torch.nn as nn


class WordRNN(nn.Module):
    def __init__(self, vocab=50, emb=16, hidden=24, padding_idx=0):
        super().__init__()
        self.embed = nn.Embedding(vocab, emb, padding_idx=padding_idx)
        self.rnn = nn.RNN(emb, hidden, batch_first=True)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, lengths):
        out, _ = self.rnn(self.embed(x))
        out = self.drop(out)
        last_hidden = out[torch.arange(len(x)), lengths - 1]
        return out, last_hidden


class Classifier(nn.Module):
    def __init__(self, encoder, encoded=24, classes=3):
        super().__init__()
        self.encoder = encoder
        self.clf = nn.Linear(encoded, classes)

    def forward(self, x, lengths):
        _, last = self.encoder(x, lengths)
        return self.clf(last)


def collate(samples, pad_to=60):
    lengths = torch.tensor([len(s) for s, _ in samples])
    x = torch.zeros(len(samples), pad_to, dtype=torch.long)
    for i, (s, _) in enumerate(samples):
        x[i, :len(s)] = torch.tensor(s)
    return x, lengths, torch.tensor([y for _, y in samples])


def corpus(n, rng):
    data = []
    for _ in range(n):
        m = int(torch.randint(3, 10, (1,), generator=rng))
        words = torch.randint(1, 50, (m,), generator=rng).tolist()
        if int(torch.randint(0, 20, (1,), generator=rng)) == 0:
            words = words * 6
        data.append((words, words[-1] % 3))
    return data


class Trainer:
    def __init__(self, model, optimizer, loss_fn):
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn

    def train_step(self, batch):
        self.model.train()
        x, lengths, y = batch
        self.optimizer.zero_grad()
        pred = self.model(x, lengths)
        loss = self.loss_fn(pred, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), (pred.argmax(1) == y).float().mean().item()

    def fit(self, data, epochs, size=32):
        for epoch in range(epochs):
            scores = [self.train_step(collate(data[i:i + size])) for i in range(0, len(data), size)]
            loss, acc = (sum(s) / len(scores) for s in zip(*scores))
            print(f"epoch {epoch} loss {loss:.4f} accuracy {acc:.3f}")


torch.manual_seed(10)
model = Classifier(WordRNN())
Trainer(model, torch.optim.Adam(model.parameters(), lr=4e-3), nn.CrossEntropyLoss()).fit(
    corpus(800, torch.Generator().manual_seed(1)), epochs=7)
