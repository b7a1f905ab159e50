import torch
import torch.nn as nn
import torch.nn.functional as F


class Denoiser(nn.Module):
    def __init__(self, channels=4, width=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.inp = nn.Conv1d(channels, width, 3, padding=1)
        self.mid = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Conv1d(width, channels, 3, padding=1)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t[:, None]).unsqueeze(-1))
        return self.out(F.silu(self.mid(h)))


class GaussianDiffusion1D(nn.Module):
    def __init__(self, model, timesteps=100):
        super().__init__()
        self.model, self.timesteps = model, timesteps
        betas = torch.linspace(1e-3, 0.08, timesteps)
        self.register_buffer("alpha_bar", torch.cumprod(1 - betas, 0))

    def forward(self, x0):
        t = torch.randint(0, self.timesteps, (len(x0),))
        a = self.alpha_bar[t].view(-1, 1, 1)
        noise = torch.randn_like(x0)
        xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
        return F.mse_loss(self.model(xt, t / self.timesteps), noise)


def record_signals(n=64, length=32):
    phase = torch.rand(n, 1) * 6.28
    freq = torch.randint(1, 4, (n, 1))
    grid = torch.linspace(0, 6.28, length)
    return torch.sin(freq * grid + phase).unsqueeze(1)


def main():
    torch.manual_seed(0)
    signals = record_signals()
    to_channels = nn.Conv1d(1, 4, 5, padding=2)
    data = to_channels(signals).detach()

    diffusion = GaussianDiffusion1D(Denoiser())
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=2e-3)
    for step in range(1, 201):
        batch = data[torch.randint(0, len(data), (32,))]
        loss = diffusion(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 50 == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
