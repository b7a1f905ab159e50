import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

torch.manual_seed(14)
AGENTS, OBS, ACTIONS, BATCH = 3, 6, 4, 64


class SharedActor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS, 32), nn.ReLU(), nn.Linear(32, ACTIONS))

    def forward(self, obs):
        return Categorical(logits=self.net(obs))


class CentralCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(AGENTS * OBS, 48), nn.ReLU(), nn.Linear(48, AGENTS))

    def forward(self, obs):
        return self.net(obs.flatten(1))


class Learner:
    def __init__(self, mini_epochs=4):
        self.actor, self.critic = SharedActor(), CentralCritic()
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=5e-3)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=5e-3)
        self.mini_epochs = mini_epochs

    def train(self, obs, actions, rewards, old_logp):
        values = self.critic(obs)
        advantages = rewards - values.detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        for _ in range(self.mini_epochs):
            ratio = (self.actor(obs).log_prob(actions) - old_logp).exp()
            actor_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            self.actor_opt.zero_grad()
            actor_loss.backward()
            self.actor_opt.step()

            critic_loss = F.mse_loss(self.critic(obs), rewards)
            self.critic_opt.zero_grad()
            critic_loss.backward()
            self.critic_opt.step()
        return actor_loss.item(), critic_loss.item()


def main():
    learner = Learner()
    for episode in range(3):
        obs = torch.randn(BATCH, AGENTS, OBS)
        with torch.no_grad():
            dist = learner.actor(obs)
            actions = dist.sample()
            old_logp = dist.log_prob(actions)
        rewards = (actions == obs[..., :ACTIONS].argmax(-1)).float()
        a_loss, c_loss = learner.train(obs, actions, rewards, old_logp)
        print(f"episode {episode} reward {rewards.mean().item():.3f} actor {a_loss:.4f} critic {c_loss:.4f}")


if __name__ == "__main__":
    main()
