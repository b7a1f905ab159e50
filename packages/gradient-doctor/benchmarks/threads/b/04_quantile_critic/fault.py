import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
OBS, ACT, N_Q, GAMMA, TAU = 5, 2, 8, 0.95, 0.2


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, o))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(OBS, ACT)

    def forward(self, obs):
        return torch.tanh(self.body(obs))


class QuantileCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(OBS + ACT, N_Q)

    def forward(self, obs, act):
        return self.body(torch.cat([obs, act], dim=-1))


def make_buffer(n=512):
    obs = torch.randn(n, OBS)
    act = torch.rand(n, ACT) * 2 - 1
    rew = -(act - 0.4).pow(2).sum(-1, keepdim=True) - 0.5
    return obs, act, rew, torch.randn(n, OBS)


def losses(actor, critic, target, batch):
    obs, act, rew, nxt = batch
    with torch.no_grad():
        y = rew + GAMMA * target(nxt, actor(nxt))
    critic_loss = F.smooth_l1_loss(critic(obs, act), y)
    q_pi = critic(obs, actor(obs))
    return critic_loss, -q_pi.mean()


def train():
    buffer = make_buffer()
    actor, critic = Actor(), QuantileCritic()
    target = copy.deepcopy(critic)
    opt_q = torch.optim.Adam(critic.parameters(), lr=5e-3)
    opt_pi = torch.optim.Adam(actor.parameters(), lr=1e-3)
    for step in range(15):
        idx = torch.randint(512, (128,))
        batch = [t[idx] for t in buffer]
        critic_loss, actor_loss = losses(actor, critic, target, batch)
        opt_q.zero_grad()
        opt_pi.zero_grad()
        critic_loss.backward()
        actor_loss.backward()
        opt_q.step()
        opt_pi.step()
        with torch.no_grad():
            for p, tp in zip(critic.parameters(), target.parameters()):
                tp.lerp_(p, TAU)
        if step % 5 == 4:
            print(f"step {step} critic loss {critic_loss.item():.4f} q(pi) {-actor_loss.item():.4f}")


if __name__ == "__main__":
    train()
