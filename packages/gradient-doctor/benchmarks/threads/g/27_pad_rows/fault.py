import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(71)

PAD, VOCAB, LENGTH = 0, 12, 10


def make_pad_mask(ids):
    return (ids != PAD).unsqueeze(1).unsqueeze(3)


class SelfAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def forward(self, x, mask):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(2, 3) / math.sqrt(d // self.h)
        score = score.masked_fill(mask == 0, float("-inf"))
        z = torch.softmax(score, dim=-1) @ v
        return self.proj(z.transpose(1, 2).reshape(b, n, d))


class Encoder(nn.Module):
    def __init__(self, d=32, heads=2, classes=2):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.att = SelfAttention(d, heads)
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, classes)

    def forward(self, ids):
        x = self.emb(ids)
        x = self.norm(x + self.att(x, make_pad_mask(ids)))
        keep = (ids != PAD).unsqueeze(2).float()
        return self.out((x * keep).sum(1) / keep.sum(1))


def sentences(n):
    ids = torch.randint(1, VOCAB, (n, LENGTH))
    lengths = torch.randint(4, LENGTH + 1, (n, 1))
    ids[torch.arange(LENGTH) >= lengths] = PAD
    label = ((ids == 3).any(1) | (ids == 5).any(1)).long()
    return ids, label


model = Encoder()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(160):
    ids, label = sentences(64)
    loss = F.cross_entropy(model(ids), label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 32 == 0 or step == 159:
        print(f"step {step:3d}  loss {loss.item():.4f}")
