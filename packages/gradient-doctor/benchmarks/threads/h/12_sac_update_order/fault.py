import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9)
S, A = 3, 1


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, o))


class GaussianActor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(S, 2 * A)

    def forward(self, s):
        mu, log_std = self.net(s).chunk(2, dim=-1)
        dist = torch.distributions.Normal(mu, log_std.clamp(-4, 1).exp())
        u = dist.rsample()
        a = torch.tanh(u)
        logp = (dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)).sum(-1, keepdim=True)
        return a, logp


class SACAgent:
    def __init__(self, alpha=0.05):
        self.actor, self.qf = GaussianActor(), mlp(S + A, 1)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.qf_opt = torch.optim.Adam(self.qf.parameters(), lr=2e-3)
        self.alpha = alpha

    def q(self, s, a):
        return self.qf(torch.cat([s, a], dim=-1))

    def update_model(self, s, a, r):
        q_loss = F.mse_loss(self.q(s, a), r)
        new_a, logp = self.actor(s)
        actor_loss = (self.alpha * logp - self.q(s, new_a)).mean()

        self.qf_opt.zero_grad()
        q_loss.backward()
        self.qf_opt.step()

        self.actor_opt.zero_grad()
        actor_loss.backward()
        self.actor_opt.step()
        return q_loss.item(), actor_loss.item()


def reward(s, a):
    return 1 - (a - 0.8 * torch.sin(s[:, :1])) ** 2


agent = SACAgent()
for it in range(401):
    s = torch.randn(64, S)
    with torch.no_grad():
        a = agent.actor(s)[0]
    lq, la = agent.update_model(s, a, reward(s, a))
    if it % 80 == 0:
        print(f"{it} q {lq:.4f} actor {la:.4f} reward {reward(s, a).mean().item():.3f}")
