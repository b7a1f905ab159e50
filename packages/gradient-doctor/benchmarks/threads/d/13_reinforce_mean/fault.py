import torch
import torch.nn as nn
from torch.distributions.normal import Normal

torch.manual_seed(0)


class Policy_Network(nn.Module):
    def __init__(self, obs_space_dims, action_space_dims):
        super().__init__()
        self.shared_net = nn.Sequential(nn.Linear(obs_space_dims, 16), nn.Tanh(), nn.Linear(16, 32), nn.Tanh())
        self.policy_mean_net = nn.Linear(32, action_space_dims)
        self.policy_stddev_net = nn.Linear(32, action_space_dims)

    def forward(self, x):
        shared = self.shared_net(x)
        return self.policy_mean_net(shared), torch.log(1 + torch.exp(self.policy_stddev_net(shared)))


class REINFORCE:
    def __init__(self, obs_space_dims, action_space_dims):
        self.learning_rate, self.gamma, self.eps = 5e-3, 0.3, 1e-6
        self.probs, self.rewards = [], []
        self.net = Policy_Network(obs_space_dims, action_space_dims)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=self.learning_rate)

    def sample_action(self, state):
        means, stddevs = self.net(state)
        distrib = Normal(means[0] + self.eps, stddevs[0] + self.eps)
        action = distrib.sample()
        self.probs.append(distrib.log_prob(action).sum())
        return action

    def update(self):
        running_g, gs = 0.0, []
        for R in self.rewards[::-1]:
            running_g = R + self.gamma * running_g
            gs.insert(0, running_g)
        deltas = torch.tensor(gs)
        log_probs = torch.stack(self.probs)
        log_prob_mean = log_probs.mean()
        loss = -torch.sum(log_prob_mean * deltas)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.probs, self.rewards = [], []


class Follow:
    """A target jumps about on the plane; the hand should be put where it is seen."""

    def reset(self):
        self.target = torch.randn(1, 2)
        return self.target

    def step(self, action):
        reward = 1 - (action - torch.tanh(self.target)).abs().mean().item()
        self.target = torch.randn(1, 2)
        return self.target, reward


env, agent, returns = Follow(), REINFORCE(2, 2), []
for episode in range(200):
    obs = env.reset()
    for _ in range(30):
        action = agent.sample_action(obs)
        obs, reward = env.step(action.view(1, 2))
        agent.rewards.append(reward)
    returns.append(sum(agent.rewards))
    agent.update()
    if (episode + 1) % 50 == 0:
        print("Episode:", episode + 1, "Average Reward: %.2f" % (sum(returns[-50:]) / 50))
