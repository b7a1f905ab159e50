import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)

VOCAB, PAD, BOS, MAXLEN = 20, 0, 1, 32


class Decoder(nn.Module):
    def __init__(self, dim=32, heads=2, layers=1):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(MAXLEN, dim)
        block = nn.TransformerEncoderLayer(dim, heads, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, layers)
        self.to_logits = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        n = ids.shape[1]
        mask = torch.triu(torch.full((n, n), float("-inf")), diagonal=1)
        h = self.tok(ids) + self.pos(torch.arange(n))
        return self.to_logits(self.blocks(h, mask=mask))


def formulas(n=64):
    ids = torch.full((n, MAXLEN), PAD)
    ids[:, 0] = BOS
    for row in ids:
        length = int(torch.randint(3, 6, (1,)))
        start = int(torch.randint(2, VOCAB, (1,)))
        for j in range(length):
            row[j + 1] = 2 + (start - 2 + 3 * j) % (VOCAB - 2)
    return ids


def train(model, steps=30):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        ids = formulas()
        xi, xo = ids[:, :-1], ids[:, 1:]
        out = model(xi)
        loss = F.cross_entropy(out.transpose(1, 2), xo)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == steps - 1:
            real = (xo != PAD) & (xi != BOS)
            acc = (out.argmax(-1)[real] == xo[real]).float().mean().item()
            print(f"step {step:2d} loss {loss.item():.4f} token acc {acc:.3f}")


train(Decoder())
