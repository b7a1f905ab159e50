import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9)
GROUPS = 6


class FullAttention(nn.Module):
    def forward(self, queries, keys, values):
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.size(-1))
        return torch.softmax(scores, dim=-1) @ values


class AttentionLayer(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.inner = FullAttention()

    def split_heads(self, x):
        B, L, D = x.shape
        x = x.view(B, L, self.n_heads, D // self.n_heads)
        return x.transpose(1, 2)

    def forward(self, x):
        B, L, D = x.shape
        q, k, v = (self.split_heads(f(x)) for f in (self.query, self.key, self.value))
        context = self.inner(q, k, v)
        return self.out(context.transpose(1, 2).reshape(B, L, D))


class Forecaster(nn.Module):
    def __init__(self, length, d_model=32, n_heads=4):
        super().__init__()
        self.embed = nn.Linear(GROUPS + 1, d_model)
        self.position = nn.Parameter(0.1 * torch.randn(length, d_model))
        self.attention = AttentionLayer(d_model, n_heads)
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Sequential(nn.Linear(d_model, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, series):
        x = self.embed(series) + self.position
        x = self.norm(x + self.attention(x))
        return self.head(x).squeeze(-1)


def make_series(n, length):
    """Every reading tends to the mean of the readings of the same station."""
    values = torch.randn(n, length)
    station = F.one_hot(torch.randint(0, GROUPS, (n, length)), GROUPS).float()
    mean = (station * values.unsqueeze(-1)).sum(1) / station.sum(1).clamp(min=1)
    return torch.cat([station, values.unsqueeze(-1)], dim=-1), (station @ mean.unsqueeze(-1)).squeeze(-1)


model = Forecaster(length=24)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(500):
    series, target = make_series(32, 24)
    loss = F.mse_loss(model(series), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0 or step == 499:
        print(f"step {step:4d}  mse {loss.item():.4f}")
