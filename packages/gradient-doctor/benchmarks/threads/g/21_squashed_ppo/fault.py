import torch
import torch.nn as nn
from torch.distributions import Normal

torch.manual_seed(43)


class Actor(nn.Module):
    def __init__(self, obs=3, act=2):
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(obs, 32), nn.Tanh(), nn.Linear(32, act))
        self.log_std = nn.Parameter(torch.zeros(act) - 0.5)

    def dist(self, obs):
        return Normal(self.mean(obs), self.log_std.exp())


def tanh_correction(z):
    return torch.log(1 - torch.tanh(z).pow(2) + 1e-6).sum(-1)


def reach(obs, action):
    goal = 0.9 * torch.sign(obs[:, :2])
    return -(action - goal).pow(2).sum(-1)


actor = Actor()
optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
clip = 0.2

for update in range(60):
    obs = torch.randn(256, 3)
    with torch.no_grad():
        pi = actor.dist(obs)
        z = pi.sample()
        old_logp = pi.log_prob(z).sum(-1)
        reward = reach(obs, torch.tanh(z))
        adv = (reward - reward.mean()) / (reward.std() + 1e-8)
    for inner in range(4):
        new_logp = actor.dist(obs).log_prob(z).sum(-1) - tanh_correction(z)
        ratio = (new_logp - old_logp).exp()
        if inner == 0:
            first_ratio = ratio.mean().item()
        loss = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if update % 10 == 0 or update == 59:
        print(f"update {update:2d}  loss {loss.item():+.3f}  first ratio {first_ratio:.3f}  reward {reward.mean().item():.3f}")
