import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal

torch.manual_seed(0)


class PolicyNetContinuous(nn.Module):
    def __init__(self, state_dim, hidden_dim, action_dim, action_bound):
        super().__init__()
        self.fc1 = nn.Linear(state_dim, hidden_dim)
        self.fc_mu = nn.Linear(hidden_dim, action_dim)
        self.fc_std = nn.Linear(hidden_dim, action_dim)
        self.action_bound = action_bound

    def forward(self, x):
        h = F.relu(self.fc1(x))
        dist = Normal(self.fc_mu(h), F.softplus(self.fc_std(h)) + 1e-4)
        normal_sample = dist.rsample()
        log_prob = dist.log_prob(normal_sample)
        action = torch.tanh(normal_sample)
        log_prob = log_prob - torch.log(1 - action.pow(2) + 1e-7)
        return action * self.action_bound, log_prob.sum(-1, keepdim=True)


class SAC:
    def __init__(self, state_dim=3, target_entropy=-1.0):
        self.actor = PolicyNetContinuous(state_dim, 48, 1, action_bound=1.0)
        self.critic = nn.Sequential(nn.Linear(state_dim + 1, 48), nn.ReLU(), nn.Linear(48, 1))
        self.log_alpha = torch.tensor(-2.0, requires_grad=True)
        self.target_entropy = target_entropy
        self.opt_actor = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        self.opt_critic = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        self.opt_alpha = torch.optim.Adam([self.log_alpha], lr=1e-2)

    def step(self, opt, loss):
        opt.zero_grad()
        loss.backward()
        opt.step()

    def update(self, s, a, r):
        self.step(self.opt_critic, F.mse_loss(self.critic(torch.cat([s, a], 1)), r))
        new_a, log_prob = self.actor(s)
        alpha = self.log_alpha.exp().detach()
        self.step(self.opt_actor, (alpha * log_prob - self.critic(torch.cat([s, new_a], 1))).mean())
        entropy_gap = (-log_prob - self.target_entropy).detach()
        self.step(self.opt_alpha, (self.log_alpha.exp() * entropy_gap).mean())
        return new_a, -log_prob.mean().item()


def reward(s, a):
    return -2 * (a - 1.2 * torch.tanh(2 * s[:, :1])).pow(2)


agent = SAC()
for it in range(500):
    s, a = torch.randn(64, 3), torch.rand(64, 1) * 2 - 1
    new_a, entropy = agent.update(s, a, reward(s, a))
    if it % 100 == 99:
        edge = (new_a.abs() > 0.95).float().mean().item()
        print(f"{it + 1}: entropy estimate {entropy:.3f} alpha {agent.log_alpha.exp().item():.3f} "
              f"at the bound {edge:.2f} reward {reward(s, new_a).mean().item():.3f}")
