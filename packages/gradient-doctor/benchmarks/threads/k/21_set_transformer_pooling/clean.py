import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(0)


class SetAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.d_head = heads, dim // heads
        self.proj_q, self.proj_k, self.proj_v = (nn.Linear(dim, dim) for _ in range(3))
        self.proj_o = nn.Linear(dim, dim)

    def forward(self, x, lengths):
        batch, longest, _ = x.shape

        def heads_of(t):
            return t.view(batch, longest, self.heads, self.d_head)

        q, k, v = heads_of(self.proj_q(x)), heads_of(self.proj_k(x)), heads_of(self.proj_v(x))
        e = torch.einsum("bxhd,byhd->bhxy", q, k) / math.sqrt(self.d_head)
        mask = torch.zeros(batch, longest, longest)
        for i, n in enumerate(lengths):
            mask[i, :, :n] = 1
        e = e.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        alpha = torch.softmax(e, dim=-1)
        out = torch.einsum("bhxy,byhd->bxhd", alpha, v).reshape(batch, longest, -1)
        return x + self.proj_o(out)


class SetTransformer(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Linear(2, dim)
        self.attend = SetAttention(dim, 2)
        self.ff = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, sets):
        lengths = [len(s) for s in sets]
        h = self.attend(self.embed(pad_sequence(sets, batch_first=True)), lengths)
        pooled = torch.stack([h[i, :n].mean(dim=0) for i, n in enumerate(lengths)])
        return self.ff(pooled).squeeze(1)


def batch_of_sets(count):
    sets = [torch.randn(int(torch.randint(3, 9, (1,))), 2) for _ in range(count)]
    spread = torch.stack([(s[:, None] - s[None]).pow(2).sum(-1).mean() for s in sets])
    return sets, spread / 4


model = SetTransformer()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(151):
    sets, spread = batch_of_sets(24)
    loss = F.mse_loss(model(sets), spread)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
