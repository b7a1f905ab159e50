import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT_VOCAB, IMAGE_VOCAB, TEXT_LEN, IMAGE_LEN = 32, 16, 40, 4
PAD = 0


class TextToCodes(nn.Module):
    """One stream: caption tokens, then the codes of the picture, predicted left to right."""

    def __init__(self, dim=32, pad=PAD):
        super().__init__()
        self.ignore_index = pad
        total = TEXT_VOCAB + IMAGE_VOCAB
        self.embed = nn.Embedding(total, dim)
        self.rnn = nn.GRU(dim, 64, batch_first=True)
        self.to_logits = nn.Linear(64, total)

    def forward(self, text, codes, return_loss=False):
        stream = torch.cat([text, codes + TEXT_VOCAB], 1)
        h, _ = self.rnn(self.embed(stream[:, :-1]))
        logits = self.to_logits(h)
        labels = stream[:, 1:]
        if not return_loss:
            return logits, labels
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.ignore_index)


def make_batch(n, generator):
    """Captions of 3 to 5 words (left of them only padding); words and codes follow from the first."""
    text = torch.full((n, TEXT_LEN), PAD)
    first = torch.randint(1, TEXT_VOCAB, (n,), generator=generator)
    length = torch.randint(3, 6, (n,), generator=generator)
    for i in range(n):
        m = int(length[i])
        text[i, -m:] = (first[i] - 1 + 5 * torch.arange(m)) % (TEXT_VOCAB - 1) + 1
    codes = (first[:, None] * torch.arange(1, IMAGE_LEN + 1)) % IMAGE_VOCAB
    return text, codes


def accuracy(model, generator):
    with torch.no_grad():
        logits, labels = model(*make_batch(200, generator))
    code = labels >= TEXT_VOCAB
    return (logits.argmax(-1) == labels)[code].float().mean().item()


def main():
    torch.manual_seed(8)
    gen = torch.Generator().manual_seed(8)
    model = TextToCodes()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(5):
        for _ in range(60):
            loss = model(*make_batch(32, gen), return_loss=True)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.3f} picture codes right {accuracy(model, gen):.2f}")


main()
