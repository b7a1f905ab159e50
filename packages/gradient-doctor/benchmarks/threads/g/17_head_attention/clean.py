import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(23)


class DotAttention(nn.Module):
    def __init__(self, key_size):
        super().__init__()
        self.scale = math.sqrt(key_size)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, q, k, v):
        return self.softmax(q @ k.transpose(-2, -1) / self.scale) @ v


class MultiHead(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.attend = DotAttention(d // heads)

    def split(self, x):
        b, n, d = x.shape
        return x.view(b, n, self.h, d // self.h).transpose(1, 2)

    def forward(self, query, memory):
        z = self.attend(self.split(self.q(query)), self.split(self.k(memory)), self.split(self.v(memory)))
        b, h, n, d = z.shape
        return self.o(z.transpose(1, 2).reshape(b, n, h * d))


class Lookup(nn.Module):
    """A list of (key, value) pairs and some questions; which value has the asked key?"""

    def __init__(self, n_key=8, n_val=6, d=32):
        super().__init__()
        self.key_emb, self.val_emb = nn.Embedding(n_key, d), nn.Embedding(n_val, d)
        self.att = MultiHead(d, 2)
        self.out = nn.Linear(d, n_val)

    def forward(self, keys, vals, ask):
        memory = self.key_emb(keys) + self.val_emb(vals)
        return self.out(self.att(self.key_emb(ask), memory))


def batch(n):
    keys = torch.rand(n, 8).argsort(1)
    vals = torch.randint(0, 6, (n, 8))
    spot = torch.randint(0, 8, (n, 2))
    return keys, vals, keys.gather(1, spot), vals.gather(1, spot)


model = Lookup()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(400):
    keys, vals, ask, answer = batch(128)
    loss = F.cross_entropy(model(keys, vals, ask).flatten(0, 1), answer.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 80 == 0 or step == 399:
        print(f"step {step:3d}  loss {loss.item():.4f}")
