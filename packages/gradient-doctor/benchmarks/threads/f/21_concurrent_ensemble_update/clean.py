import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
N_Q, OBS, ACT, BATCH = 4, 3, 1, 64


class QEnsemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.qs = nn.ModuleList(
            nn.Sequential(nn.Linear(OBS + ACT, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
            for _ in range(N_Q))

    def forward(self, obs, act):
        x = torch.cat([obs, act], 1)
        return torch.cat([q(x) for q in self.qs], 1)


class Buffer:
    def __init__(self):
        self.rows = []

    def add(self, *row):
        self.rows.append(row)

    def sample(self):
        pick = torch.randint(len(self.rows), (BATCH,)).tolist()
        return [torch.stack(col) for col in zip(*[self.rows[i] for i in pick])]


def reward(obs, act):
    """Best action depends on the observation, the reward is never positive."""
    best = 0.8 * torch.sin(2 * obs[..., :1])
    return -0.25 * (act - best).abs()


policy = nn.Sequential(nn.Linear(OBS, 32), nn.ReLU(), nn.Linear(32, ACT), nn.Tanh())
critics = QEnsemble()
policy_optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
q_optimizer = torch.optim.Adam(critics.parameters(), lr=1e-3)
buffer = Buffer()


def update():
    obs, act, rew = buffer.sample()
    q_loss = F.mse_loss(critics(obs, act), rew.expand(-1, N_Q)) * N_Q
    q_optimizer.zero_grad()
    q_loss.backward()
    q_optimizer.step()

    policy_loss = -critics(obs, policy(obs)).mean()
    policy_optimizer.zero_grad()
    policy_loss.backward()

    policy_optimizer.step()
    return q_loss.item() / N_Q


for t in range(1, 801):
    obs = torch.rand(OBS) * 2 - 1
    with torch.no_grad():
        act = (policy(obs) + 0.1 * torch.randn(ACT)).clamp(-1, 1)
    buffer.add(obs, act, reward(obs, act))
    if t > 20:
        loss = update()
    if t % 160 == 0:
        with torch.no_grad():
            o = torch.rand(500, OBS) * 2 - 1
            a = policy(o)
            print(f"t {t} q loss {loss:.4f} Q of own actions {critics(o, a).mean():+.3f} their reward {reward(o, a).mean():+.3f}")
