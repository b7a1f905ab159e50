import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class RelationReader(nn.Module):
    """Finds which relation a question asks for (time first)."""

    def __init__(self, vocab=60, width=16, relations=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gru = nn.GRU(width, width, bidirectional=True)
        self.attn = nn.Sequential(nn.Linear(3 * width, width), nn.Tanh(), nn.Linear(width, 1))
        self.label = nn.Linear(3 * width, relations)

    def forward(self, words):
        x = self.embed(words)
        outputs, _ = self.gru(x)
        both = torch.cat((x, outputs), dim=2)
        scores = self.attn(both)
        weights = F.softmax(scores, dim=-1)
        return self.label((weights * both).sum(0)), weights


def questions(n, length=14, vocab=60, relations=6):
    words = torch.randint(relations, vocab, (length, n))
    relation = torch.randint(0, relations, (n,))
    where = torch.randint(0, length, (n,))
    words[where, torch.arange(n)] = relation
    return words, relation, where


def train(steps=120):
    model = RelationReader()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = [p.detach().clone() for p in model.attn.parameters()]
    for step in range(steps):
        words, relation, where = questions(64)
        logits, weights = model(words)
        loss = F.cross_entropy(logits, relation)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            on_key = weights[where, torch.arange(64), 0].mean().item()
            mean = weights.mean().item()
            moved = max((p - b).abs().max().item() for p, b in zip(model.attn.parameters(), before))
            print(f"step {step:3d} loss {loss.item():.3f} weight of the key word {on_key:.3f} "
                  f"(mean {mean:.3f}) attention moved {moved:.3f}")


train()
