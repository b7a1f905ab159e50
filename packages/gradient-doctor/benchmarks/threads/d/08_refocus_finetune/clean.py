import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Denoiser(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.time = nn.Linear(1, channels)
        self.conv_in = nn.Conv1d(2, channels, 5, padding=2)
        self.mid = nn.Conv1d(channels, channels, 5, padding=2)
        self.conv_out = nn.Conv1d(channels, 1, 5, padding=2)

    def forward(self, noisy, sigma, condition):
        h = F.silu(self.conv_in(torch.cat([noisy, condition], 1)) + self.time(sigma.log())[..., None])
        return self.conv_out(F.silu(self.mid(h)))


class Accelerator:
    """One process, nothing to wrap."""

    def __init__(self, max_norm=1.0):
        self.max_norm = max_norm
        self.sync_gradients = True

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters):
        nn.utils.clip_grad_norm_(parameters, self.max_norm)


def focal_stack(batch=16, width=32):
    phase, freq = torch.rand(batch, 1) * math.tau, torch.randint(1, 5, (batch, 1))
    sharp = torch.sin(freq * torch.linspace(0, math.tau, width) + phase).unsqueeze(1)
    blurred = F.avg_pool1d(sharp, 5, 1, 2)
    return sharp, blurred


def main(max_train_steps=200):
    accelerator = Accelerator()
    unet = Denoiser()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=4e-3)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max_train_steps)
    global_step, train_loss = 0, 0.0
    while global_step < max_train_steps:
        sharp, blurred = focal_stack()
        sigma = (0.5 * torch.randn(len(sharp), 1)).exp()
        noisy = sharp + sigma[..., None] * torch.randn_like(sharp)
        denoised = unet(noisy, sigma, blurred)
        loss = F.mse_loss(denoised, sharp)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(unet.parameters())
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        train_loss += loss.item()
        global_step += 1
        if global_step % 40 == 0:
            print(f"step {global_step} loss {train_loss / 40:.4f} lr {lr_scheduler.get_last_lr()[0]:.5f}")
            train_loss = 0.0


main()
