import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
MAX_ACTION, NOISE = 2.0, 1e-6


def reward_fn(s, a):
    goal = 1.4 * torch.tanh(s[:, :1] - s[:, 1:2])
    return -(a - goal) ** 2


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mu = nn.Linear(64, 1)
        self.log_std = nn.Linear(64, 1)

    def sample_normal(self, state):
        h = self.body(state)
        mu, log_std = self.mu(h), self.log_std(h).clamp(-5, 1)
        std = log_std.exp()
        u = mu + std * torch.randn_like(mu)
        log_probs = -0.5 * ((u - mu) / std) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
        action = torch.tanh(u) * MAX_ACTION
        log_probs = log_probs - torch.log(MAX_ACTION * (1 - torch.tanh(u).pow(2)) + NOISE)
        return action, log_probs.sum(1, keepdim=True)


def mlp(n_in):
    return nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


actor, critic, value = Actor(), mlp(4), mlp(3)
opt_a = torch.optim.Adam(actor.parameters(), lr=1e-3)
opt_c = torch.optim.Adam(critic.parameters(), lr=3e-3)
opt_v = torch.optim.Adam(value.parameters(), lr=3e-3)
alpha, gamma = 0.05, 0.5

for it in range(601):
    s = torch.randn(128, 3)
    with torch.no_grad():
        a, _ = actor.sample_normal(s)
        r = reward_fn(s, a)
        a_pi, logp_pi = actor.sample_normal(s)
        v_target = critic(torch.cat([s, a_pi], 1)) - alpha * logp_pi
        q_target = r + gamma * value(torch.randn(128, 3))
    value_loss = F.mse_loss(value(s), v_target)
    opt_v.zero_grad()
    value_loss.backward()
    opt_v.step()
    critic_loss = F.mse_loss(critic(torch.cat([s, a], 1)), q_target)
    opt_c.zero_grad()
    critic_loss.backward()
    opt_c.step()

    a_new, logp = actor.sample_normal(s)
    actor_loss = (alpha * logp - critic(torch.cat([s, a_new], 1))).mean()
    opt_a.zero_grad()
    actor_loss.backward()
    opt_a.step()
    if it % 100 == 0:
        print(f"it {it} reward {r.mean().item():.3f} critic {critic_loss.item():.3f} actor {actor_loss.item():.3f}")
