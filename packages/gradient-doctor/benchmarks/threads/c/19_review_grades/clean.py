import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(0)

PAD = 0


class SentenceGrader(nn.Module):
    def __init__(self, vocab=50, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.encoder = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.grade = nn.Linear(width, 1)

    def forward(self, tokens):
        hidden = self.encoder(self.embed(tokens))
        weight = (tokens != PAD).unsqueeze(-1).float()
        pooled = (hidden * weight).sum(1) / weight.sum(1)
        return self.grade(pooled).squeeze(-1)


VALUE = torch.randn(50) * 2


def reviews(n):
    lengths = torch.randint(2, 24, (n,)).tolist()
    texts = [torch.randint(1, 50, (length,)) for length in lengths]
    grades = torch.stack([3 + VALUE[t].mean() for t in texts])
    return pad_sequence(texts, batch_first=True, padding_value=PAD), grades


def main(steps=200):
    model = SentenceGrader()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens, grades = reviews(64)
        loss = nn.functional.mse_loss(model(tokens), grades)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0 or step == steps - 1:
            print(f"step {step:3d} loss {loss.item():.4f}")
    short = torch.randint(1, 50, (1, 3))
    padded = torch.cat([short, torch.full((1, 20), PAD)], 1)
    print(f"the same review alone {model(short).item():.3f} and padded {model(padded).item():.3f}")


main()
