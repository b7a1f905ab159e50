import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
N_AGENTS, OBS, ACT = 3, 4, 2


class Net(nn.Module):
    def __init__(self, inputs, outputs, lr, squash=False):
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(inputs, 32), nn.Linear(32, 32), nn.Linear(32, outputs)
        self.squash = squash
        self.optimizer = torch.optim.Adam(self.parameters(), lr=lr)

    def forward(self, *parts):
        x = torch.cat(parts, dim=1)
        x = self.out(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return torch.tanh(x) if self.squash else x


class Agent:
    def __init__(self):
        self.actor = Net(OBS, ACT, 1e-3, squash=True)
        self.critic = Net(N_AGENTS * (OBS + ACT), 1, 3e-3)
        self.target_actor, self.target_critic = copy.deepcopy(self.actor), copy.deepcopy(self.critic)


class MADDPG:
    def __init__(self, gamma=0.9):
        self.agents = [Agent() for _ in range(N_AGENTS)]
        self.gamma = gamma

    def learn(self, memory):
        obs, actions, rewards, new_obs = memory
        states, states_ = obs.flatten(1), new_obs.flatten(1)
        with torch.no_grad():
            new_actions = torch.cat([a.target_actor(new_obs[:, i]) for i, a in enumerate(self.agents)], dim=1)
        mu = torch.cat([a.actor(obs[:, i]) for i, a in enumerate(self.agents)], dim=1)
        old_actions = actions.flatten(1)
        losses = []
        for i, agent in enumerate(self.agents):
            with torch.no_grad():
                value_ = agent.target_critic(states_, new_actions).flatten()
                target = rewards[:, i] + self.gamma * value_
            critic_loss = F.mse_loss(agent.critic(states, old_actions).flatten(), target)
            agent.critic.optimizer.zero_grad()
            critic_loss.backward()
            agent.critic.optimizer.step()

            actor_loss = -agent.critic(states, mu).mean()
            agent.actor.optimizer.zero_grad()
            actor_loss.backward(retain_graph=True)
            agent.actor.optimizer.step()
            losses.append(actor_loss.item())
        return losses


def memory(n=64):
    obs = torch.randn(n, N_AGENTS, OBS)
    actions = torch.rand(n, N_AGENTS, ACT) * 2 - 1
    rewards = -(actions - obs[..., :ACT].tanh()).pow(2).sum(-1)
    return obs, actions, rewards, torch.randn_like(obs)


maddpg = MADDPG()
for step in range(121):
    losses = maddpg.learn(memory())
    if step % 30 == 0:
        print(f"step {step:3d}  actor losses", [round(x, 3) for x in losses])
