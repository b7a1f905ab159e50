import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(28)
S, A = 4, 2


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, o))


class TD3Loss(nn.Module):
    """Both losses from one call, as a dictionary."""

    def __init__(self, actor, critic):
        super().__init__()
        self.actor, self.critic = actor, critic

    def forward(self, batch):
        s, a, r = batch["state"], batch["action"], batch["reward"]
        pi = torch.tanh(self.actor(s))
        rows = torch.cat([torch.cat([s, pi], 1), torch.cat([s, a], 1)], 0)
        q_pi, q_data = self.critic(rows).chunk(2, dim=0)
        return {"loss_actor": -q_pi.mean(), "loss_qvalue": F.mse_loss(q_data, r)}


def sample_batch(actor, n=64):
    s = torch.randn(n, S)
    with torch.no_grad():
        a = (torch.tanh(actor(s)) + 0.3 * torch.randn(n, A)).clamp(-1, 1)
    goal = torch.stack([torch.sin(s[:, 0]), torch.cos(s[:, 1])], 1)
    r = 1 - (a - goal).pow(2).sum(1, keepdim=True)
    return {"state": s, "action": a, "reward": r}


actor, critic = mlp(S, A), mlp(S + A, 1)
loss_module = TD3Loss(actor, critic)
opt_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
opt_critic = torch.optim.Adam(critic.parameters(), lr=3e-3)

for it in range(501):
    batch = sample_batch(actor)
    losses = loss_module(batch)

    opt_actor.zero_grad()
    losses["loss_actor"].backward()
    opt_actor.step()

    opt_critic.zero_grad()
    losses["loss_qvalue"].backward()
    opt_critic.step()
    if it % 100 == 0:
        print(it, "q %.4f" % losses["loss_qvalue"].item(), "reward %.3f" % batch["reward"].mean().item())
