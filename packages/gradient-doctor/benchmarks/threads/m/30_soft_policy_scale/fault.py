import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class ActionSpace:
    def __init__(self, low, high):
        self.low, self.high = torch.tensor(low), torch.tensor(high)


class SoftDeterministicPolicy(nn.Module):
    def __init__(self, state_dim, space, hidden=48):
        super().__init__()
        self.action_dim = len(space.low)
        self.model = nn.Sequential(nn.Linear(state_dim, hidden), nn.ReLU(), nn.Linear(hidden, 2 * self.action_dim))
        self.tanh_scale = (space.high - space.low) / 2
        self.tanh_mean = (space.high + space.low) / 2

    def forward(self, state):
        return self.sample(self.normal(self.model(state)))

    def normal(self, outputs):
        means, log_std = outputs[:, :self.action_dim], outputs[:, self.action_dim:]
        return torch.distributions.Normal(means, log_std.clamp(-5, 1).exp())

    def sample(self, normal):
        raw = normal.rsample()
        action = self.squash(raw)
        log_prob = normal.log_prob(raw)
        log_prob = log_prob - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(1)

    def squash(self, x):
        return torch.tanh(x) * self.tanh_scale + self.tanh_mean


def torque_cost(state, action):
    return (action - 1.5 * torch.tanh(state[:, :2])).pow(2).sum(1)


space = ActionSpace([-2.0, -2.0], [2.0, 2.0])
policy = SoftDeterministicPolicy(4, space)
q = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 1))
opt_pi = torch.optim.Adam(policy.parameters(), lr=2e-3)
opt_q = torch.optim.Adam(q.parameters(), lr=2e-3)
temperature = 0.1

for it in range(300):
    s = torch.randn(64, 4)
    a = torch.rand(64, 2) * 4 - 2
    q_loss = F.mse_loss(q(torch.cat([s, a], 1)).squeeze(1), -torque_cost(s, a))
    opt_q.zero_grad()
    q_loss.backward()
    opt_q.step()

    action, log_prob = policy(s)
    pi_loss = (temperature * log_prob - q(torch.cat([s, action], 1)).squeeze(1)).mean()
    opt_pi.zero_grad()
    pi_loss.backward()
    opt_pi.step()
    if it % 60 == 59 or it == 0:
        print(f"{it + 1}: q loss {q_loss.item():.3f} pi loss {pi_loss.item():.3f} "
              f"cost {torque_cost(s, action).mean().item():.3f}")
