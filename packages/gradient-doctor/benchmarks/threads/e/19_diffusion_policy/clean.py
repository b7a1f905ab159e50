import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def cosine_beta_schedule(timesteps, s=0.008):
    t = torch.linspace(0, timesteps, timesteps + 1)
    acp = torch.cos((t / timesteps + s) / (1 + s) * torch.pi * 0.5) ** 2
    return (1 - acp[1:] / acp[:-1]).clamp(max=0.999)


class Denoiser(nn.Module):
    def __init__(self, action_dim=2, obs_dim=3, width=64):
        super().__init__()
        self.time = nn.Embedding(64, 16)
        self.net = nn.Sequential(
            nn.Linear(action_dim + obs_dim + 16, width), nn.Mish(), nn.Linear(width, width), nn.Mish(),
            nn.Linear(width, action_dim),
        )

    def forward(self, x, t, obs):
        return self.net(torch.cat([x, obs, self.time(t)], 1))


class DiffusionModel:
    def __init__(self, network, steps=20, predict_epsilon=False):
        self.network, self.steps, self.predict_epsilon = network, steps, predict_epsilon
        self.betas = cosine_beta_schedule(steps)
        self.acp = torch.cumprod(1 - self.betas, 0)

    def loss(self, actions, obs):
        t = torch.randint(0, self.steps, (len(actions),))
        return self.p_losses(actions, obs, t)

    def p_losses(self, x_start, obs, t):
        noise = torch.randn_like(x_start)
        a = self.acp[t, None]
        x_noisy = a.sqrt() * x_start + (1 - a).sqrt() * noise
        x_recon = self.network(x_noisy, t, obs)
        if self.predict_epsilon:
            return F.mse_loss(x_recon, noise, reduction="mean")
        else:
            return F.mse_loss(x_recon, x_start, reduction="mean")

    @torch.no_grad()
    def sample(self, obs):
        x = torch.randn(len(obs), 2)
        for k in reversed(range(self.steps)):
            t = torch.full((len(obs),), k)
            x0 = self.network(x, t, obs).clamp(-2, 2)
            prev = self.acp[k - 1] if k else torch.tensor(1.0)
            eps = (x - self.acp[k].sqrt() * x0) / (1 - self.acp[k]).sqrt()
            x = prev.sqrt() * x0 + (1 - prev).sqrt() * eps
        return x


def expert(n):
    obs = torch.randn(n, 3)
    return obs, torch.stack([torch.sin(obs[:, 0] + obs[:, 1]), torch.tanh(obs[:, 2])], 1)


model = DiffusionModel(Denoiser())
optimizer = torch.optim.AdamW(model.network.parameters(), lr=2e-3)
for epoch in range(1, 6):
    total = 0.0
    for _ in range(100):
        obs, actions = expert(128)
        loss = model.loss(actions, obs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / 100
    obs, actions = expert(512)
    error = (model.sample(obs) - actions).abs().mean()
    print(f"epoch {epoch} loss {total:.4f} error of the sampled actions {error:.3f}")
