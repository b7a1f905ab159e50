import torch
import torch.nn as nn
from torch.distributions import Normal

torch.manual_seed(0)


class Actor(nn.Module):
    def __init__(self, obs_dim=4, act_dim=2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, 32), nn.ReLU())
        self.mu = nn.Linear(32, act_dim)
        self.log_std = nn.Linear(32, act_dim)

    def sample(self, obs):
        h = self.body(obs)
        dist = Normal(self.mu(h), self.log_std(h).clamp(-4, 1).exp())
        raw = dist.rsample()
        action = torch.tanh(raw)
        log_prob = dist.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(-1)


class Agent:
    def __init__(self, act_dim=2):
        self.actor = Actor(act_dim=act_dim)
        self.critic = nn.Sequential(nn.Linear(4 + act_dim, 32), nn.ReLU(), nn.Linear(32, 1))
        self.expected_entropy = -float(act_dim)
        self.log_alpha = torch.tensor(0.0, requires_grad=True)
        self.alpha = self.log_alpha.exp()
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        self.alpha_opt = torch.optim.Adam([self.log_alpha], lr=3e-3)

    def q(self, obs, action):
        return self.critic(torch.cat([obs, action], -1)).squeeze(-1)

    def update(self, obs, action, reward):
        critic_loss = (self.q(obs, action) - reward).pow(2).mean()
        self.critic_opt.zero_grad()
        critic_loss.backward()
        self.critic_opt.step()

        self.alpha = self.log_alpha.exp()
        new_action, log_prob = self.actor.sample(obs)
        actor_loss = (self.alpha.detach() * log_prob - self.q(obs, new_action)).mean()
        self.actor_opt.zero_grad()
        actor_loss.backward()
        self.actor_opt.step()

        alpha_loss = -(self.alpha * (log_prob.detach() + self.expected_entropy)).mean()
        self.alpha_opt.zero_grad()
        alpha_loss.backward()
        self.alpha_opt.step()
        return critic_loss.item(), actor_loss.item(), self.alpha.item()


agent = Agent()
for step in range(300):
    obs = torch.randn(64, 4)
    action = torch.rand(64, 2) * 2 - 1
    reward = -(action - torch.tanh(obs[:, :2])).pow(2).sum(-1)
    c, a, alpha = agent.update(obs, action, reward)
    if step % 60 == 59:
        print(f"step {step + 1}: critic {c:.3f} actor {a:.3f} alpha {alpha:.3f}")
