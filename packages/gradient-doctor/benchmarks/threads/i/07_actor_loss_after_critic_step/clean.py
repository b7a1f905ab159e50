import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(4)


def mlp(sizes):
    layers = []
    for i in range(len(sizes) - 1):
        layers.append(nn.Linear(sizes[i], sizes[i + 1]))
        if i < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class QFunction(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.net = mlp([obs_dim + act_dim, 64, 64, 1])

    def forward(self, obs, act):
        return self.net(torch.cat([obs, act], dim=1))


class DDPGTrainer:
    def __init__(self, obs_dim=3, act_dim=1, discount=0.9, tau=0.02):
        self.qf, self.target_qf = QFunction(obs_dim, act_dim), QFunction(obs_dim, act_dim)
        self.policy = mlp([obs_dim, 64, act_dim])
        self.target_qf.load_state_dict(self.qf.state_dict())
        self.qf_optimizer = torch.optim.Adam(self.qf.parameters(), lr=1e-3)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=5e-4)
        self.discount, self.tau = discount, tau

    def act(self, obs):
        return torch.tanh(self.policy(obs))

    def train_from_batch(self, obs, actions, rewards, next_obs):
        with torch.no_grad():
            q_target = rewards + self.discount * self.target_qf(next_obs, self.act(next_obs))
        qf_loss = F.mse_loss(self.qf(obs, actions), q_target)

        self.qf_optimizer.zero_grad()
        qf_loss.backward()
        self.qf_optimizer.step()

        policy_loss = -self.qf(obs, self.act(obs)).mean()
        self.policy_optimizer.zero_grad()
        policy_loss.backward()
        self.policy_optimizer.step()

        with torch.no_grad():
            for p, tp in zip(self.qf.parameters(), self.target_qf.parameters()):
                tp.lerp_(p, self.tau)
        return qf_loss.item(), policy_loss.item()


def sample_transitions(n):
    obs, actions = torch.randn(n, 3), torch.rand(n, 1) * 2 - 1
    best = torch.tanh(obs[:, :1] - obs[:, 1:2])
    return obs, actions, 1.0 - (actions - best).pow(2), torch.randn(n, 3)


trainer = DDPGTrainer()
for it in range(250):
    qf_loss, policy_loss = trainer.train_from_batch(*sample_transitions(128))
    if it % 50 == 0 or it == 249:
        with torch.no_grad():
            obs = torch.randn(512, 3)
            gap = (trainer.act(obs) - torch.tanh(obs[:, :1] - obs[:, 1:2])).pow(2).mean()
        print(f"{it:4d}  qf {qf_loss:.4f}  policy {policy_loss:.4f}  distance to best action {gap.item():.4f}")
