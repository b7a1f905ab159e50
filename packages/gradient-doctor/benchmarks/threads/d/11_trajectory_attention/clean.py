import math

import torch
import torch.nn as nn

torch.manual_seed(5)


class Attention(nn.Module):
    def __init__(self, input_dim, head_dim, output_dim, head_num):
        super().__init__()
        self.head_num, self.head_dim = head_num, head_dim
        self.attention_pre = nn.Linear(input_dim, head_dim * head_num * 3)
        self.project = nn.Linear(head_dim * head_num, output_dim)

    def split(self, x):
        b, n, _ = x.shape
        return x.view(b, n, self.head_num, self.head_dim).permute(0, 2, 1, 3).contiguous()

    def forward(self, x, mask=None):
        query, key, value = (self.split(t) for t in torch.chunk(self.attention_pre(x), 3, dim=2))
        score = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.head_dim)
        if mask is not None:
            score = score.masked_fill(~mask[:, None, None, :], value=-1e9)
        score = torch.softmax(score, dim=-1)
        attention = torch.matmul(score, value).permute(0, 2, 1, 3).flatten(2)
        return self.project(attention)


class ReturnPredictor(nn.Module):
    """How much reward did this (short or long) trajectory bring?"""

    def __init__(self, obs_shape=6, hidden=32):
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(obs_shape, hidden), nn.ReLU())
        self.attention = Attention(hidden, 8, hidden, 4)
        self.mlp = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, obs, mask):
        x = self.embedding(obs)
        x = x + self.attention(x, mask)
        return self.mlp(x[:, 0]).squeeze(-1)


class Buffer:
    """Ring of fixed slots; a short trajectory leaves old observations behind it."""

    def __init__(self, slots=64, longest=16, obs_shape=6):
        self.obs = torch.randn(slots, longest, obs_shape)
        self.length = torch.full((slots,), longest)
        self.longest = longest

    def collect(self):
        self.length = torch.randint(2, self.longest // 2, self.length.shape)
        for i, n in enumerate(self.length.tolist()):
            self.obs[i, :n] = torch.randn(n, self.obs.shape[-1])
        mask = torch.arange(self.longest) < self.length[:, None]
        reward = self.obs[..., 0].abs() + self.obs[..., 1]
        mean_reward = (reward * mask).sum(1) / mask.sum(1)
        return self.obs.clone(), mask, mean_reward


buffer, model = Buffer(), ReturnPredictor()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
running = 0.0
for it in range(1, 401):
    obs, mask, mean_reward = buffer.collect()
    loss = nn.functional.mse_loss(model(obs, mask), mean_reward)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running += loss.item() / 80
    if it % 80 == 0:
        print(f"iter {it} mse {running:.4f}")
        running = 0.0
