import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Embeddings(nn.Module):
    def __init__(self, vocab, dim, length):
        super().__init__()
        self.word = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(length, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids):
        return self.norm(self.word(ids) + self.position.weight[: ids.size(1)])


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x):
        x = self.n1(x + self.attn(x, x, x, need_weights=False)[0])
        return self.n2(x + self.ff(x))


class Encoder(nn.Module):
    def __init__(self, vocab=16, dim=32, depth=3, length=12):
        super().__init__()
        self.embeddings = Embeddings(vocab, dim, length)
        self.layer = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.gradient_checkpointing = False

    def forward(self, ids):
        hidden = self.embeddings(ids)
        for layer in self.layer:
            if self.gradient_checkpointing and self.training:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return hidden


class SequenceClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = Encoder()
        self.classifier = nn.Linear(32, 2)

    def forward(self, ids):
        return self.classifier(self.bert(ids)[:, 0])


def pairs(n=64):
    """does the first token come again in the sentence?"""
    ids = torch.randint(0, 16, (n, 9))
    ids[:, 1:] = torch.where(ids[:, 1:] == ids[:, :1], (ids[:, 1:] + 1) % 16, ids[:, 1:])
    label = torch.randint(0, 2, (n,))
    where = torch.randint(1, 9, (n,))
    rows = label.nonzero().squeeze(1)
    ids[rows, where[rows]] = ids[rows, 0]
    return ids, label


model = SequenceClassifier().train()
model.bert.gradient_checkpointing = True
for parameter in model.bert.embeddings.parameters():
    parameter.requires_grad = False

optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
mean = 0.0
for step in range(1, 301):
    ids, label = pairs()
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean += (logits.argmax(1) == label).float().mean().item() / 60
    if step % 60 == 0:
        print(f"step {step} loss {loss.item():.3f} accuracy {mean:.3f}")
        mean = 0.0
