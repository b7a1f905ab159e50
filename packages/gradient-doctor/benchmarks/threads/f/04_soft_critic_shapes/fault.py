import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal

OBS, ACT, BATCH = 8, 6, 128


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, o))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(OBS, 2 * ACT)

    def sample(self, obs):
        mu, log_std = self.net(obs).chunk(2, dim=-1)
        dist = Normal(mu, log_std.clamp(-3, 1).exp())
        x = dist.rsample()
        y = torch.tanh(x)
        log_prob = dist.log_prob(x) - torch.log(1 - y.pow(2) + 1e-6)
        return y, log_prob


class SAC:
    def __init__(self, gamma=0.9, alpha=0.3, tau=0.02):
        self.actor, self.critic = Actor(), mlp(OBS + ACT, 1)
        self.critic_old = copy.deepcopy(self.critic)
        self.actor_optim = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.critic_optim = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        self.gamma, self.alpha, self.tau = gamma, alpha, tau

    def learn(self, obs, act, rew, obs_next):
        with torch.no_grad():
            a_next, logp_next = self.actor.sample(obs_next)
            q_next = self.critic_old(torch.cat([obs_next, a_next], -1))
            target_q = rew + self.gamma * (q_next - self.alpha * logp_next)
        critic_loss = F.mse_loss(self.critic(torch.cat([obs, act], -1)), target_q)
        self.critic_optim.zero_grad()
        critic_loss.backward()
        self.critic_optim.step()

        a, logp = self.actor.sample(obs)
        actor_loss = (self.alpha * logp - self.critic(torch.cat([obs, a], -1))).mean()
        self.actor_optim.zero_grad()
        actor_loss.backward()
        self.actor_optim.step()
        for old, new in zip(self.critic_old.parameters(), self.critic.parameters()):
            old.data.lerp_(new.data, self.tau)
        return critic_loss.item()

    @torch.no_grad()
    def compare(self, obs, env, steps=40):
        """Q of the policy's first action, and what the policy then gets (reward and entropy)."""
        act, _ = self.actor.sample(obs)
        q, soft_return = self.critic(torch.cat([obs, act], -1)).mean().item(), 0.0
        for k in range(steps):
            rew, obs = env(obs, act)
            act, logp = self.actor.sample(obs)
            soft_return += self.gamma ** k * (rew.mean() - self.gamma * self.alpha * logp.sum(-1).mean()).item()
        return q, soft_return


def main():
    torch.manual_seed(0)
    agent = SAC()
    push = 0.5 * torch.randn(ACT, OBS)
    matters = torch.tensor([2.0, 2.0, 1.0, 0.5, 0.5, 0.0])

    def env(obs, act):
        rew = -((act - torch.tanh(obs @ push.t())).pow(2) * matters).sum(-1, keepdim=True)
        return rew, 0.8 * obs + 0.3 * torch.cat([act, act[:, :2]], -1)

    for it in range(601):
        obs, act = torch.randn(BATCH, OBS), torch.rand(BATCH, ACT) * 2 - 1
        rew, obs_next = env(obs, act)
        loss = agent.learn(obs, act, rew, obs_next)
        if it % 100 == 0:
            q, ret = agent.compare(torch.randn(500, OBS), env)
            print(f"update {it:3d} critic loss {loss:.4f} Q {q:+.2f} soft return {ret:+.2f}")


main()
