import torch
import torch.nn as nn

torch.manual_seed(0)


class Field(nn.Module):
    """Colour of a point in the unit square."""

    def __init__(self, bands=4, width=64):
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(bands) * torch.pi)
        self.net = nn.Sequential(
            nn.Linear(4 * bands, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 3),
        )

    def forward(self, xy):
        phase = (xy[..., None] * self.freqs).flatten(1)
        return self.net(torch.cat([phase.sin(), phase.cos()], 1))


def scene(xy):
    x, y = xy[:, 0], xy[:, 1]
    rings = torch.sin(12 * (x - 0.5).hypot(y - 0.5))
    return torch.stack([rings, x * y, torch.cos(5 * x)], 1)


def train(steps=200, rays=256):
    field = Field()
    optimizer = torch.optim.SGD(field.parameters(), lr=0.1, momentum=0.9)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [120, 170], gamma=0.33)
    for step in range(steps):
        xy = torch.rand(rays, 2)
        loss = nn.functional.smooth_l1_loss(field(xy), scene(xy))
        optimizer.zero_grad()
        grad_scaler.scale(loss).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        scheduler.step()
        if step % 40 == 0 or step == steps - 1:
            print(f"step {step:3d} loss {loss.item():.5f}")


train()
