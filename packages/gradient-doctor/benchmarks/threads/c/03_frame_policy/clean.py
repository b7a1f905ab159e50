import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(0)


class CatchEnv:
    """A dot is left, in the middle or right; the paddle must be put under it."""

    def __init__(self, n_envs=64, size=12):
        self.n, self.size = n_envs, size

    def reset(self):
        self.place = torch.randint(0, 3, (self.n,))
        raw = torch.randint(0, 40, (self.n, 1, self.size, self.size))
        for i, place in enumerate(self.place.tolist()):
            raw[i, 0, 3:6, place * 4 : place * 4 + 4] += 200
        return raw.float() / 255.0

    def step(self, action):
        return (action == self.place).float()


def preprocess(frame):
    frame = frame[:, :, 2:10, :]
    return frame


class ActorCritic(nn.Module):
    def __init__(self, n_actions=3):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ELU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.hidden = nn.Sequential(nn.Linear(8 * 4 * 6, 32), nn.ELU())
        self.actor = nn.Linear(32, n_actions)
        self.critic = nn.Linear(32, 1)

    def forward(self, frame):
        h = self.hidden(self.conv(frame))
        return self.actor(h), self.critic(h).squeeze(-1)


def train(updates=120):
    env, net = CatchEnv(), ActorCritic()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for update in range(updates):
        logits, value = net(preprocess(env.reset()))
        dist = Categorical(logits=logits)
        action = dist.sample()
        reward = env.step(action)
        advantage = reward - value
        policy_loss = -(dist.log_prob(action) * advantage.detach()).mean()
        loss = policy_loss + 0.5 * advantage.pow(2).mean() - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 20 == 0 or update == updates - 1:
            print(f"update {update:3d} reward {reward.mean().item():.2f} loss {loss.item():+.4f}")


train()
