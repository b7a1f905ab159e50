import torch
from torch import nn


class PushPolicy(nn.Module):
    """State (in centimetres) to a chunk of actions."""

    def __init__(self, state_dim=6, horizon=4, act_dim=2):
        super().__init__()
        self.shape = (horizon, act_dim)
        self.body = nn.Sequential(
            nn.BatchNorm1d(state_dim),
            nn.Linear(state_dim, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.05),
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.05),
            nn.Linear(64, horizon * act_dim),
        )

    def forward(self, state):
        return self.body(state).view(-1, *self.shape)

    def select_action(self, state):
        return self(state[None])[0, 0]


def expert(state):
    goal, pos = state[:, :2], state[:, 2:4]
    first = torch.tanh((goal - pos) / 40.0)
    return torch.stack([first * 0.7 ** i for i in range(4)], 1)


def demonstrations(n):
    state = 100 * torch.rand(n, 6) + torch.tensor([200.0, 0.0, 200.0, 0.0, 50.0, 50.0])
    return state, expert(state)


def rollout(policy, episodes=10, length=15):
    """Mean distance to the goal at the end of an episode."""
    policy.eval()
    gap = 0.0
    with torch.no_grad():
        for _ in range(episodes):
            state = demonstrations(1)[0][0]
            for _ in range(length):
                state[2:4] += 20 * policy.select_action(state)
            gap += (state[:2] - state[2:4]).norm().item() / episodes
    policy.train()
    return gap


def train(steps=400, eval_freq=100):
    torch.manual_seed(1000)
    policy = PushPolicy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=1e-6)
    policy.train()
    for step in range(steps):
        if step % eval_freq == 0:
            print(f"step {step} distance after a rollout {rollout(policy):.1f} cm")
        state, action = demonstrations(64)
        loss = (policy(state) - action).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % eval_freq == 0:
            print(f"step {step + 1} l1 {loss.item():.4f}")
    print(f"end: distance after a rollout {rollout(policy):.1f} cm")


train()
