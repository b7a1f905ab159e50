from dataclasses import dataclass

import torch
import torch.nn as nn

torch.manual_seed(0)


@dataclass
class Rollout:
    obs: torch.Tensor
    action: torch.Tensor
    logp: torch.Tensor
    prev_values: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor


class FlowPolicy(nn.Module):
    def __init__(self, obs_dim=8, act_dim=2, hidden=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.mean = nn.Linear(hidden, act_dim)
        self.log_std = nn.Parameter(torch.zeros(act_dim))
        self.value_head = nn.Linear(hidden, 1)

    def dist(self, obs):
        return torch.distributions.Normal(self.mean(self.trunk(obs)), self.log_std.exp())

    def value(self, obs):
        return self.value_head(self.trunk(obs))


GOAL = torch.randn(8, 2) * 0.5
WORTH = torch.randn(8)


@torch.no_grad()
def rollout(policy, n=256):
    obs = torch.randn(n, 8)
    dist = policy.dist(obs)
    action = dist.sample()
    reward = 3 * (obs @ WORTH).unsqueeze(1) - (action - obs @ GOAL).square().sum(1, keepdim=True)
    values = policy.value(obs)
    advantages = reward - values
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return Rollout(obs, action, dist.log_prob(action).sum(1), values, reward, advantages.squeeze(1))


def critic_loss(values, returns, prev_values, clip=5.0):
    clipped = prev_values + (values - prev_values).clamp(-clip, clip)
    return torch.max((returns - values).pow(2), (returns - clipped).pow(2)).mean()


def actor_loss(logp, old_logp, advantages, eps=0.2):
    ratio = (logp - old_logp).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages).mean()


policy = FlowPolicy()
opt = torch.optim.Adam(policy.parameters(), lr=3e-3)
for update in range(61):
    data = rollout(policy)
    for _ in range(4):
        for idx in torch.randperm(256).split(64):
            logp = policy.dist(data.obs[idx]).log_prob(data.action[idx]).sum(1)
            values = policy.value(data.obs[idx])
            loss = actor_loss(logp, data.logp[idx], data.advantages[idx])
            loss = loss + 0.5 * critic_loss(values, data.returns[idx], data.prev_values[idx])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 5.0)
            opt.step()
    if update % 15 == 0:
        explained = 1 - (data.returns - data.prev_values).var() / data.returns.var()
        cost = (policy.mean(policy.trunk(data.obs)) - data.obs @ GOAL).square().sum(1).mean()
        print(f"update {update} explained variance {explained:.3f} distance to goal {cost:.3f}")
