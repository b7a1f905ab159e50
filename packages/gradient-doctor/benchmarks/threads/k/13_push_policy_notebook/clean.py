import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(4)
OBS, ACT, HORIZON, STEPS = 3, 2, 4, 20


class ActionNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(OBS + ACT * HORIZON + 1, 64), nn.Mish(),
            nn.Linear(64, 64), nn.Mish(),
            nn.Linear(64, ACT * HORIZON),
        )

    def forward(self, sample, t, cond):
        return self.mlp(torch.cat([sample, t, cond], dim=1))


def demos(n):
    obs = torch.rand(n, OBS) * 2 - 1
    ramp = torch.linspace(0, 1, HORIZON)
    start, goal = obs[:, :2], torch.tanh(obs[:, :2].flip(1) + obs[:, 2:])
    chunk = start.unsqueeze(1) + ramp.view(1, -1, 1) * (goal - start).unsqueeze(1)
    return obs, chunk.flatten(1)


# --- streaming flow policy: regress the velocity of the action chunk
sfp_velocity_net = ActionNet()
optimizer = torch.optim.AdamW(sfp_velocity_net.parameters(), lr=1e-3)
for step in range(150):
    obs, chunk = demos(128)
    noise = torch.randn_like(chunk)
    t = torch.rand(128, 1)
    target = chunk - noise
    loss = F.mse_loss(sfp_velocity_net((1 - t) * noise + t * chunk, t, obs), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"flow policy       step {step + 1}  loss {loss.item():.4f}")

# --- diffusion policy: predict the noise
dp_noise_pred_net = ActionNet()
optimizer = torch.optim.AdamW(dp_noise_pred_net.parameters(), lr=1e-3)
alpha_bar = torch.cumprod(1 - torch.linspace(1e-3, 0.25, STEPS), dim=0)
for step in range(300):
    obs, chunk = demos(128)
    noise = torch.randn_like(chunk)
    k = torch.randint(0, STEPS, (128,))
    a = alpha_bar[k].unsqueeze(1)
    noisy = a.sqrt() * chunk + (1 - a).sqrt() * noise
    loss = F.mse_loss(dp_noise_pred_net(noisy, k.unsqueeze(1) / STEPS, obs), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 59:
        print(f"diffusion policy  step {step + 1}  loss {loss.item():.4f}")
