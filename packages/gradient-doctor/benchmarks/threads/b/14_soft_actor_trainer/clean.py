import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal

torch.manual_seed(13)
OBS, ACT = 4, 2


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 48), nn.ReLU(), nn.Linear(48, o))


class TanhPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(OBS, 2 * ACT)

    def forward(self, obs):
        mean, log_std = self.body(obs).chunk(2, dim=-1)
        dist = Normal(mean, log_std.clamp(-5, 1).exp())
        raw = dist.rsample()
        act = torch.tanh(raw)
        logp = (dist.log_prob(raw) - torch.log(1 - act.pow(2) + 1e-6)).sum(-1, keepdim=True)
        return act, logp


class Trainer:
    def __init__(self, alpha=0.1, gamma=0.95, lr=3e-3):
        self.policy, self.qf = TanhPolicy(), mlp(OBS + ACT, 1)
        self.target = copy.deepcopy(self.qf)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=lr)
        self.qf_optimizer = torch.optim.Adam(self.qf.parameters(), lr=lr)
        self.alpha, self.gamma = alpha, gamma

    def train_from(self, obs, act, rew, nxt):
        q_pred = self.qf(torch.cat([obs, act], dim=-1))
        with torch.no_grad():
            nxt_act, nxt_logp = self.policy(nxt)
            target_q = self.target(torch.cat([nxt, nxt_act], dim=-1)) - self.alpha * nxt_logp
        qf_loss = F.mse_loss(q_pred, rew + self.gamma * target_q)

        self.qf_optimizer.zero_grad()
        qf_loss.backward()
        self.qf_optimizer.step()

        new_act, logp = self.policy(obs)
        q_new = self.qf(torch.cat([obs, new_act], dim=-1))
        policy_loss = (self.alpha * logp - q_new).mean()

        self.policy_optimizer.zero_grad()
        policy_loss.backward()
        self.policy_optimizer.step()

        with torch.no_grad():
            for p, tp in zip(self.qf.parameters(), self.target.parameters()):
                tp.lerp_(p, 0.05)
        return qf_loss.item(), policy_loss.item()


def main():
    trainer = Trainer()
    for step in range(15):
        obs, nxt = torch.randn(64, OBS), torch.randn(64, OBS)
        act = torch.rand(64, ACT) * 2 - 1
        rew = -(act - obs[:, :ACT].tanh()).pow(2).sum(-1, keepdim=True)
        qf_loss, policy_loss = trainer.train_from(obs, act, rew, nxt)
        if step % 3 == 0:
            print(f"step {step} qf loss {qf_loss:.4f} policy loss {policy_loss:.4f}")


if __name__ == "__main__":
    main()
