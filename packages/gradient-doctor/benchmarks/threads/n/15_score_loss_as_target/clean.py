import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
ACT, OBS, SIGMA_DATA = 6, 10, 0.5


class Denoiser(nn.Module):
    """EDM style preconditioning around an inner network."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(ACT + OBS + 1, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, ACT))

    def scalings(self, sigma):
        total = sigma ** 2 + SIGMA_DATA ** 2
        return SIGMA_DATA ** 2 / total, sigma * SIGMA_DATA / total.sqrt(), 1 / total.sqrt()

    def loss(self, state, action, noise, sigma):
        c_skip, c_out, c_in = self.scalings(sigma)
        noised = action + noise * sigma
        model_output = self.inner(torch.cat([noised * c_in, state, sigma.log() / 4], -1))
        target = (action - c_skip * noised) / c_out
        loss = (model_output - target).pow(2).flatten(1).mean(1).mean()
        return target, model_output

    def denoise(self, state, noised, sigma):
        c_skip, c_out, c_in = self.scalings(sigma)
        inner = self.inner(torch.cat([noised * c_in, state, sigma.log() / 4], -1))
        return c_skip * noised + c_out * inner


def demonstrations(n, mixing=torch.randn(OBS, ACT) / 3):
    state = torch.randn(n, OBS)
    return state, 0.5 * torch.tanh(state @ mixing)


class Policy:
    def __init__(self):
        self.model = Denoiser()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def diffusion_loss(self, state, action):
        sigma = (torch.randn(len(state), 1) * 1.2 - 1.2).exp()
        return self.model.loss(state, action, torch.randn_like(action), sigma)

    def training_step(self, state, action):
        target, model_output = self.diffusion_loss(state, action)
        loss = (model_output - target).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def action_error(self, n=256):
        state, action = demonstrations(n)
        sigma = torch.full((n, 1), 3.0)
        return F.l1_loss(self.model.denoise(state, action + 3 * torch.randn_like(action), sigma), action).item()


policy = Policy()
for step in range(401):
    loss = policy.training_step(*demonstrations(64))
    if step % 100 == 0:
        print(f"step {step:3d}  loss {loss:.4f}  action error {policy.action_error():.3f}")
