import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(0)

VOCAB, PAD, MAXLEN = 30, 0, 40


class TextClassifier(nn.Module):
    def __init__(self, dim=16, hidden=32):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.encoder = nn.LSTM(dim, hidden, batch_first=True)
        self.predictor = nn.Linear(hidden, 2)

    def forward(self, seq, lengths):
        states, _ = self.encoder(self.embedding(seq))
        feature = states[torch.arange(len(seq)), lengths - 1]
        return self.predictor(feature)


def sentences(n=64):
    texts, labels = [], []
    for _ in range(n):
        length = int(torch.randint(3, 9, (1,)))
        words = torch.randint(3, VOCAB, (length,))
        label = int(torch.randint(0, 2, (1,)))
        words[-2] = 1 + label
        texts.append(words)
        labels.append(label)
    texts.append(torch.full((MAXLEN,), 3))
    lengths = torch.tensor([len(t) for t in texts])[:-1]
    batch = pad_sequence(texts, batch_first=True, padding_value=PAD)[:-1]
    return batch, lengths, torch.tensor(labels)


def train(model, steps=30):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(steps):
        seq, lengths, labels = sentences()
        scores = model(seq, lengths)
        loss = criterion(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == steps - 1:
            acc = (scores.argmax(1) == labels).float().mean().item()
            print(f"step {step:2d} loss {loss.item():.4f} acc {acc:.2f}")


train(TextClassifier())
