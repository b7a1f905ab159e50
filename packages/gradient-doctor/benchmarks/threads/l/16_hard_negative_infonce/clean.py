import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
DIM, N_NEG = 24, 6
topics = torch.randn(30, DIM)


class BiEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(DIM, 16)
        self.passage = nn.Linear(DIM, 16)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(0.5)))

    def forward(self, q, p, negatives):
        norm = lambda t: F.normalize(t, dim=-1)
        return norm(self.query(q)), norm(self.passage(p)), norm(self.passage(negatives))


def infonce_loss(q, p, neg, neg_mask, temperature):
    in_batch = q @ p.T
    hard = torch.einsum("bd,bnd->bn", q, neg)
    hard = (hard / temperature).masked_fill(~neg_mask, float("-inf"))
    logits = torch.cat([in_batch / temperature, hard], dim=1)
    return F.cross_entropy(logits, torch.arange(len(q)))


def collate(n):
    t = torch.randperm(30)[:n]
    q = topics[t] + 0.4 * torch.randn(n, DIM)
    p = topics[t] + 0.4 * torch.randn(n, DIM)
    count = torch.randint(1, N_NEG + 1, (n,))
    mask = torch.arange(N_NEG)[None, :] < count[:, None]
    neg = topics[(t[:, None] + torch.randint(1, 30, (n, N_NEG))) % 30] + 0.6 * topics[t][:, None]
    return q, p, neg * mask.unsqueeze(-1), mask


def recall_at_1(model):
    with torch.no_grad():
        q = topics + 0.4 * torch.randn(30, DIM)
        zq, zp, _ = model(q, topics, topics[:, None])
        return ((zq @ zp.T).argmax(1) == torch.arange(30)).float().mean().item()


model = BiEncoder()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(200):
    q, p, neg, mask = collate(16)
    loss = infonce_loss(*model(q, p, neg), mask, model.log_temperature.exp())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step < 2 or step % 50 == 49:
        print(f"step {step + 1}  loss {loss.item():.4f}  temperature {model.log_temperature.exp().item():.4f}  recall@1 {recall_at_1(model):.2f}")
