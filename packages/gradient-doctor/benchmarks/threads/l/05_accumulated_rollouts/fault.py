import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
N_ENVS, OBS, ACT = 4, 6, 3


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS + N_ENVS, 64), nn.Tanh(), nn.Linear(64, ACT))

    def forward(self, obs, env_id):
        tag = F.one_hot(torch.full((len(obs),), env_id), N_ENVS).float()
        return self.net(torch.cat([obs, tag], dim=-1))


class Algorithm:
    def __init__(self, policy, lr=2e-3, grad_acc_steps=1):
        self.policy = policy
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
        self.acc_steps = grad_acc_steps
        self.counter = 0

    def calc_loss(self, obs, env_id, expert):
        return F.mse_loss(self.policy(obs, env_id), expert)

    def update_with_gradient(self, loss):
        self.optimizer.zero_grad()
        (loss / self.acc_steps).backward()
        self.counter += 1
        if self.counter % self.acc_steps == 0:
            nn.utils.clip_grad_norm_(self.policy.parameters(), 10.0)
            self.optimizer.step()


experts = [torch.randn(OBS, ACT) for _ in range(N_ENVS)]


def unroll(env_id, n=64):
    obs = torch.randn(n, OBS)
    return obs, torch.tanh(obs @ experts[env_id])


def evaluate(policy):
    out = []
    with torch.no_grad():
        for e in range(N_ENVS):
            obs, act = unroll(e, 256)
            out.append(F.mse_loss(policy(obs, e), act).item())
    return out


alg = Algorithm(Policy(), grad_acc_steps=N_ENVS)
for iteration in range(400):
    for env_id in range(N_ENVS):
        obs, act = unroll(env_id)
        loss = alg.calc_loss(obs, env_id, act)
        alg.update_with_gradient(loss)
    if iteration % 80 == 79:
        errs = evaluate(alg.policy)
        print(f"iter {iteration + 1}  imitation error per env: " + "  ".join(f"{e:.3f}" for e in errs))
