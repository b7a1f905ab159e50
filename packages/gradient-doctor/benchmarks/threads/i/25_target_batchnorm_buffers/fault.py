import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(25)


class Critic(nn.Module):
    def __init__(self, obs_dim=4, act_dim=1, hidden=64):
        super().__init__()
        self.norm = nn.BatchNorm1d(obs_dim + act_dim)
        self.net = nn.Sequential(nn.Linear(obs_dim + act_dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, obs, act):
        return self.net(self.norm(torch.cat([obs, act], dim=1)))


def soft_update_params(net, target_net, tau):
    with torch.no_grad():
        for param, target_param in zip(net.parameters(), target_net.parameters()):
            target_param.copy_(tau * param + (1 - tau) * target_param)


class Evaluator:
    """Learns the action values of a fixed behaviour."""

    def __init__(self, gamma=0.8, tau=0.05):
        self.critic = Critic()
        self.target_critic = copy.deepcopy(self.critic)
        self.target_critic.requires_grad_(False)
        self.target_critic.eval()
        self.optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        self.gamma, self.tau = gamma, tau

    def update(self, obs, act, reward, next_obs, next_act):
        with torch.no_grad():
            target = reward + self.gamma * self.target_critic(next_obs, next_act)
        self.critic.train()
        q = self.critic(obs, act)
        loss = F.mse_loss(q, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        soft_update_params(self.critic, self.target_critic, self.tau)
        return loss.item()

    def mean_value(self, obs, act):
        self.critic.eval()
        with torch.no_grad():
            return self.critic(obs, act).mean().item()


scale = torch.tensor([30.0, 5.0, 80.0, 0.5])
offset = torch.tensor([100.0, -20.0, 0.0, 7.0])


def transitions(n):
    z, act = torch.randn(n, 4), torch.rand(n, 1) * 2 - 1
    next_z, next_act = torch.randn(n, 4), torch.rand(n, 1) * 2 - 1
    reward = 1.0 + 0.5 * z[:, :1] - act.pow(2)
    return z * scale + offset, act, reward, next_z * scale + offset, next_act


agent = Evaluator()
expected = (1.0 - 1.0 / 3.0) / (1.0 - agent.gamma)
for it in range(401):
    loss = agent.update(*transitions(128))
    if it % 50 == 0:
        obs, act, *_ = transitions(512)
        print(f"{it:3d}  td loss {loss:10.4f}  mean value {agent.mean_value(obs, act):9.3f}  expected {expected:.3f}")
