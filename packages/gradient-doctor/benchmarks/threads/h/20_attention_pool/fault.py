import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)
PARTS, DIM, CLASSES = 12, 8, 4


class PartAttention(nn.Module):
    """Scores every part capsule and sums them up with those weights."""

    def __init__(self, dim, hidden=16):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, parts):
        logits = self.score(parts)
        weights = F.softmax(logits, dim=2)
        return (weights * parts).sum(dim=1), weights


class CapsuleClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = PartAttention(DIM)
        self.out = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES))

    def forward(self, parts):
        pooled, weights = self.attention(parts)
        return self.out(pooled), weights


def objects(n):
    """One part per object carries a flag; only that part shows the class."""
    parts = torch.randn(n, PARTS, DIM)
    parts[:, :, 0] = 0.0
    y = torch.randint(0, CLASSES, (n,))
    where = torch.randint(0, PARTS, (n,))
    rows = torch.arange(n)
    parts[rows, where] = 0.3 * torch.randn(n, DIM)
    parts[rows, where, 0] = 2.0
    parts[rows, where, 1 + y] += 1.5
    return parts, y


x, y = objects(800)
model = CapsuleClassifier()
start = model.attention.score[0].weight.detach().clone()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(121):
    out, weights = model(x)
    loss = F.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if epoch % 20 == 0:
        acc = (out.argmax(1) == y).float().mean().item()
        moved = (model.attention.score[0].weight.detach() - start).abs().max().item()
        print(f"epoch {epoch} loss {loss.item():.4f} acc {acc:.3f} scorer moved {moved:.4f}")
