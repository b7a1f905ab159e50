"""A squashed-Gaussian actor and a critic over one encoder, two optimizers, several epochs."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

STEPS, EPISODES, OBSERVATION, HIDDEN, ACTION = 4, 32, 5, 16, 2


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.mean = nn.Linear(HIDDEN, ACTION)
        self.log_std = nn.Parameter(torch.full((ACTION,), -0.5))

    def forward(self, features):
        hidden = F.elu(self.body(features))
        return Normal(self.mean(hidden), self.log_std.exp())


def log_density(law, raw):
    """Of tanh(raw) when raw is drawn from `law`."""
    correction = 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))
    return (law.log_prob(raw) - correction).sum(-1)


class Agent:
    def __init__(self):
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(OBSERVATION, HIDDEN), nn.Tanh())
        self.actor = Actor()
        self.critic = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        critic_side = [*self.encoder.parameters(), *self.critic.parameters()]
        self.critic_optimizer = torch.optim.Adam(critic_side, lr=1e-2)

    @torch.no_grad()
    def collect(self, generator):
        observation = torch.randn(EPISODES, OBSERVATION, generator=generator)
        law = self.actor(self.encoder(observation))
        raw = law.sample()
        action = torch.tanh(raw)
        goal = observation[:, :ACTION].sin()
        reward = 1.0 - (action - goal).square().sum(-1)
        density = log_density(law, raw)
        return {"observation": observation, "raw": raw, "reward": reward, "density": density}

    def losses(self, batch):
        features = self.encoder(batch["observation"])
        value = self.critic(features).squeeze(-1)
        advantage = (batch["reward"] - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        law = self.actor(features)
        raw = batch["raw"]
        density = log_density(law, raw)
        ratio = torch.exp(density - batch["density"])
        clipped = ratio.clamp(0.8, 1.2)
        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        entropy = law.entropy().sum(-1).mean()
        actor_loss = policy_loss - 1e-3 * entropy
        critic_loss = F.mse_loss(value, batch["reward"])
        return actor_loss, critic_loss

    def update(self, batch):
        actor_loss, critic_loss = self.losses(batch)
        self.actor_optimizer.zero_grad()
        self.critic_optimizer.zero_grad()
        loss = actor_loss + 0.5 * critic_loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.actor.parameters(), 0.5)
        self.actor_optimizer.step()
        self.critic_optimizer.step()
        return loss.item()


def main():
    agent = Agent()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        batch = agent.collect(generator)
        for _ in range(2):
            loss = agent.update(batch)
        print(f"step {step} loss {loss:.3f} reward {batch['reward'].mean():.3f}")


if __name__ == "__main__":
    main()
