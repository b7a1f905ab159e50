import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal

torch.manual_seed(2)
MIN_LOG_STD, MAX_LOG_STD = -20.0, 2.0


class Actor(nn.Module):
    def __init__(self, state_dim, hidden=64):
        super().__init__()
        self.fc1 = nn.Linear(state_dim, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.mu_head = nn.Linear(hidden, 1)
        self.log_std_head = nn.Linear(hidden, 1)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        mu = self.mu_head(x)
        log_std = self.log_std_head(x)
        return mu, torch.clamp(log_std, MIN_LOG_STD, MAX_LOG_STD)

    def evaluate(self, state):
        mu, log_std = self(state)
        dist = Normal(mu, log_std.exp())
        z = dist.rsample()
        action = torch.tanh(z)
        log_prob = dist.log_prob(z) - torch.log(1 - action.pow(2) + 1e-7)
        return action, log_prob, log_std


class Critic(nn.Module):
    def __init__(self, state_dim, hidden=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(state_dim + 1, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, s, a):
        return self.net(torch.cat([s, a], dim=1))


def reward_fn(s, a):
    return -10 * (a - 0.7 * torch.sin(s[:, :1])).pow(2)


actor, critic = Actor(3), Critic(3)
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
ALPHA = 0.05

for it in range(320):
    s = torch.randn(64, 3)
    a = torch.rand(64, 1) * 2 - 1
    critic_loss = F.mse_loss(critic(s, a), reward_fn(s, a))
    critic_opt.zero_grad()
    critic_loss.backward()
    critic_opt.step()

    action, log_prob, log_std = actor.evaluate(s)
    pi_loss = (ALPHA * log_prob - critic(s, action)).mean()
    actor_opt.zero_grad()
    pi_loss.backward()
    actor_opt.step()
    if it % 80 == 79:
        print(f"{it + 1}: critic {critic_loss.item():.3f}  pi loss {pi_loss.item():.3f}  "
              f"std {log_std.exp().mean().item():.3f}  reward {reward_fn(s, action).mean().item():.3f}")
