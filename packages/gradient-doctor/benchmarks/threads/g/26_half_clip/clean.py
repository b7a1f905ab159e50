import torch
import torch.nn as nn

torch.manual_seed(67)


class NoisePredictor(nn.Module):
    def __init__(self, dim=8, hidden=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + 1, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, dim))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))


class Trainer:
    def __init__(self, unet, max_grad_norm=1.0, fp16=True):
        self.unet = unet
        self.max_grad_norm = max_grad_norm
        self.optimizer = torch.optim.SGD(unet.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", enabled=fp16)

    def step(self, latents):
        noise = torch.randn_like(latents)
        t = torch.rand(len(latents), 1)
        noisy = (1 - t) * latents + t * noise
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = self.unet(noisy, t)
        loss = (pred.float() - noise).pow(2).mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.unet.parameters(), self.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


trainer = Trainer(NoisePredictor())
styles = 2 * torch.randn(3, 8)
recent = []
for it in range(400):
    latents = styles[torch.randint(0, 3, (128,))] + 0.1 * torch.randn(128, 8)
    recent.append(trainer.step(latents))
    if it % 80 == 79:
        print(f"it {it + 1}  loss {sum(recent) / len(recent):.4f}")
        recent = []
