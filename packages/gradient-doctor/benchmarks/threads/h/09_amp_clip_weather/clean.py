import torch
import torch.nn as nn

torch.manual_seed(4)
VARS, LAT, LON = 3, 8, 16


class TinyForecast(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.enc = nn.Conv2d(VARS, width, 3, padding=1)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.dec = nn.Conv2d(width, VARS, 1)
        self.act = nn.GELU()

    def forward(self, x):
        h = self.act(self.enc(x))
        h = h + self.act(self.mid(h))
        return x + self.dec(h)


def rollout_pair(n):
    x = torch.randn(n, VARS, LAT, LON)
    x = (x + x.roll(1, -1) + x.roll(1, -2)) / 3 ** 0.5
    y = 0.7 * x.roll(1, dims=-1) + 0.3 * x.flip(1)
    return x, y


class Trainer:
    def __init__(self, model, clip=1.0):
        self.model = model
        self.clip = clip
        self.opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = self.model(x)
        loss = nn.functional.mse_loss(pred.float(), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=self.clip)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()


trainer = Trainer(TinyForecast())
for it in range(241):
    loss = trainer.step(*rollout_pair(32))
    if it % 30 == 0:
        print(f"iter {it:3d} loss {loss:.5f} scale {trainer.scaler.get_scale():.0f}")
