import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

torch.manual_seed(27)
STEPS, DIM = 50, 2


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM + 2, width), nn.SiLU(),
                                 nn.Linear(width, width), nn.SiLU(), nn.Linear(width, DIM))

    def forward(self, x, t):
        a = t.float().unsqueeze(1) / STEPS * 3.1416
        return self.net(torch.cat([x, a.sin(), a.cos()], dim=1))


class DiffusionTrainer:
    def __init__(self, model, lr=4e-3, warmup_steps=20, cosine_decay_max_steps=400):
        self.model = model
        self.abar = torch.cumprod(1 - torch.linspace(1e-3, 0.12, STEPS), dim=0)
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        warmup = LinearLR(self.opt, start_factor=0.05, total_iters=warmup_steps)
        cosine = CosineAnnealingLR(self.opt, T_max=warmup_steps)
        self.sched = SequentialLR(self.opt, [warmup, cosine], milestones=[warmup_steps])

    def loss(self, x0):
        t = torch.randint(0, STEPS, (len(x0),))
        a = self.abar[t].unsqueeze(1)
        noise = torch.randn_like(x0)
        x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
        return F.mse_loss(self.model(x_t, t), noise)

    def train_step(self, x0):
        loss = self.loss(x0)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.sched.step()
        return loss.item()


def ring(n):
    a = torch.rand(n) * 6.2832
    return torch.stack([a.cos(), a.sin()], dim=1) * 1.5


trainer = DiffusionTrainer(Denoiser())
running = 1.0
for step in range(411):
    loss = trainer.train_step(ring(256))
    running = 0.95 * running + 0.05 * loss
    if step % 15 == 0:
        print(f"step {step:3d} loss {running:.4f} lr {trainer.opt.param_groups[0]['lr']:.6f}")
