import torch
import torch.nn as nn
from torch.distributions import Normal

torch.manual_seed(4)
OBS, ACT, N = 3, 2, 256


class GaussianActor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu = nn.Sequential(nn.Linear(OBS, 32), nn.Tanh(), nn.Linear(32, ACT))
        self.log_std = nn.Parameter(torch.zeros(ACT))

    def dist(self, obs):
        return Normal(self.mu(obs), self.log_std.exp())


class Buffer:
    def __init__(self):
        self.data = {}

    def add(self, **kw):
        for k, v in kw.items():
            self.data.setdefault(k, []).append(v)

    def get(self):
        return {k: torch.cat(v) for k, v in self.data.items()}


def env_reward(obs, act):
    goal = torch.stack([obs[:, 0], -obs[:, 1]], dim=-1).clamp(-0.9, 0.9)
    return -(act - goal).pow(2).sum(-1)


@torch.no_grad()
def collect(actor):
    buf = Buffer()
    for _ in range(4):
        obs = torch.randn(N // 4, OBS)
        dist = actor.dist(obs)
        act = dist.sample()
        logp = dist.log_prob(act).sum(-1)
        env_act = act.clamp(-1.0, 1.0)
        buf.add(obs=obs, act=env_act, logp=logp, rew=env_reward(obs, env_act))
    return buf.get()


def update(actor, opt, batch, epochs=5, eps=0.2):
    adv = batch["rew"] - batch["rew"].mean()
    adv = adv / (adv.std() + 1e-8)
    for epoch in range(epochs):
        logp = actor.dist(batch["obs"]).log_prob(batch["act"]).sum(-1)
        ratio = (logp - batch["logp"]).exp()
        loss = -torch.min(ratio * adv, ratio.clamp(1 - eps, 1 + eps) * adv).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if epoch == 0:
            print(f"  ratio mean {ratio.mean().item():.3f} max {ratio.max().item():.2f}")
    return loss.item()


def main():
    actor = GaussianActor()
    opt = torch.optim.Adam(actor.parameters(), lr=5e-3)
    for it in range(6):
        batch = collect(actor)
        loss = update(actor, opt, batch)
        std = actor.log_std.exp().mean().item()
        print(f"iter {it} reward {batch['rew'].mean().item():.3f} loss {loss:.4f} std {std:.3f}")


if __name__ == "__main__":
    main()
