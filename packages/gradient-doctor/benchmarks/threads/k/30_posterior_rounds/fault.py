import math
import torch
import torch.nn as nn


class PosteriorNet(nn.Module):
    def __init__(self, n_obs=8, n_params=2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_obs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mean = nn.Linear(64, n_params)
        self.log_std = nn.Linear(64, n_params)

    def forward(self, obs, theta):
        h = self.body(obs)
        log_std = self.log_std(h).clamp(-4, 2)
        z = (theta - self.mean(h)) / log_std.exp()
        return (0.5 * z ** 2 + log_std + 0.5 * math.log(2 * math.pi)).sum(1).mean()


def simulate(n, width):
    theta = width * (2 * torch.rand(n, 2) - 1)
    t = torch.linspace(0, 1, 8)
    obs = torch.sin(3 * theta[:, :1] * t) + theta[:, 1:] * t + 0.3 * torch.randn(n, 8)
    return theta, obs


class Engine:
    def __init__(self):
        self.network = PosteriorNet()
        self.initial_state = self.get_state_dict()

    def get_state_dict(self):
        return self.network.state_dict()

    def train_round(self, n_sims, width, epochs=60):
        self.network.load_state_dict(self.initial_state)
        optimizer = torch.optim.Adam(self.network.parameters(), lr=5e-3)
        theta, obs = simulate(n_sims, width)
        theta_val, obs_val = simulate(300, width)
        with torch.no_grad():
            start = self.network(obs_val, theta_val).item()
        best, best_state = float("inf"), None
        for _ in range(epochs):
            for part in torch.randperm(n_sims).split(50):
                optimizer.zero_grad()
                loss = self.network(obs[part], theta[part])
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                val = self.network(obs_val, theta_val).item()
            if val < best:
                best, best_state = val, self.get_state_dict()
        self.network.load_state_dict(best_state)
        with torch.no_grad():
            final = self.network(obs_val, theta_val).item()
        return start, best, final


torch.manual_seed(0)
engine = Engine()
for number, width in enumerate([1.0, 0.8, 0.6]):
    start, best, final = engine.train_round(200, width)
    print(f"round {number}  before training {start:.3f}  best validation {best:.3f}  network in use {final:.3f}")
