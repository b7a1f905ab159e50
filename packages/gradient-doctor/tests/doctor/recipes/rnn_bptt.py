"""Truncated backpropagation through time: an LSTM whose state runs on, detached, chunk by chunk."""

import torch
import torch.nn.functional as F
from torch import nn

EPOCHS, ROWS, CHUNKS, LENGTH, VOCABULARY, WIDTH = 2, 4, 3, 6, 14, 12
PAD, IGNORE = 0, -100


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, state=None):
        embedded = self.embed(tokens)
        hidden, state = self.lstm(embedded, state)
        logits = self.decoder(self.dropout(hidden))
        return logits, state


def make_texts(generator):
    """Right-padded rows, cut into chunks; what follows the end of a text is not learnt."""
    width = CHUNKS * LENGTH
    tokens = torch.randint(1, VOCABULARY, (ROWS, width + 1), generator=generator)
    stop = width + 1 - torch.randint(0, LENGTH, (ROWS, 1), generator=generator)
    tokens = torch.where(torch.arange(width + 1) < stop, tokens, torch.tensor(PAD))
    following = tokens[:, 1:]
    targets = torch.where(following != PAD, following, torch.tensor(IGNORE))
    parts = zip(tokens[:, :-1].split(LENGTH, dim=1), targets.split(LENGTH, dim=1))
    return [{"tokens": part, "targets": goal} for part, goal in parts]


def loss_of(model, chunk, state=None):
    logits, state = model(chunk["tokens"], state)
    rows = logits.float().flatten(0, 1)
    goals = chunk["targets"].flatten()
    loss = F.cross_entropy(rows, goals, ignore_index=IGNORE)
    return loss, state


@torch.no_grad()
def evaluate(model, chunks):
    model.eval()
    state, total = None, 0.0
    for chunk in chunks:
        loss, state = loss_of(model, chunk, state)
        total += loss.item()
    return total / len(chunks)


def build():
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer


def main():
    model, optimizer = build()
    generator = torch.Generator().manual_seed(1)
    chunks = make_texts(generator)
    for epoch in range(EPOCHS):
        model.train()
        state = None
        for chunk in chunks:
            loss, state = loss_of(model, chunk, state)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            state = tuple(part.detach() for part in state)
        print(f"epoch {epoch} loss {loss.item():.3f} evaluated {evaluate(model, chunks):.3f}")


if __name__ == "__main__":
    main()
