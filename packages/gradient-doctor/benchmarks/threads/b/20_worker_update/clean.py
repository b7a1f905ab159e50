import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

torch.manual_seed(19)
STATE, ACTIONS, GAMMA = 4, 3, 0.3


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(STATE, 32), nn.Linear(32, ACTIONS)

    def forward(self, s):
        return F.softmax(self.fc2(torch.tanh(self.fc1(s))), dim=-1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(STATE, 32), nn.Linear(32, 1)

    def forward(self, s):
        return self.fc2(torch.tanh(self.fc1(s))).squeeze(-1)


class Worker:
    def __init__(self):
        self.actor, self.critic = Actor(), Critic()
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), *self.critic.parameters()], lr=2e-2)
        self.memory = []

    def run_episode(self, length=64):
        score = 0.0
        for _ in range(length):
            state = torch.randn(STATE)
            dist = Categorical(self.actor(state))
            action = dist.sample()
            reward = 1.0 if action.item() == state[:ACTIONS].argmax().item() else 0.0
            self.memory.append((state, dist.log_prob(action), reward))
            score += reward
        return score / length

    def learn(self):
        states = torch.stack([t[0] for t in self.memory])
        log_probs = torch.stack([t[1] for t in self.memory])
        returns, g = [], 0.0
        for t in reversed(self.memory):
            g = t[2] + GAMMA * g
            returns.insert(0, g)
        returns = torch.tensor(returns)
        values = self.critic(states)
        advantage = (returns - values).detach()
        actor_loss = -(log_probs * advantage).mean()
        critic_loss = F.mse_loss(values, returns)
        loss = actor_loss + 0.5 * critic_loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.memory = []
        return actor_loss.item(), critic_loss.item()


def main():
    worker = Worker()
    for episode in range(25):
        score = worker.run_episode()
        a_loss, c_loss = worker.learn()
        if episode % 4 == 0:
            print(f"episode {episode} score {score:.3f} actor {a_loss:.4f} critic {c_loss:.4f}")


if __name__ == "__main__":
    main()
