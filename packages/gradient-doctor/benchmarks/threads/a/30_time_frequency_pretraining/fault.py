import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class TFModel(nn.Module):
    def __init__(self, length=32, dim=16):
        super().__init__()
        bins = length // 2 + 1
        self.encoder_t = nn.Sequential(nn.Linear(length, 48), nn.ReLU(), nn.Linear(48, dim))
        self.encoder_f = nn.Sequential(nn.Linear(bins, 48), nn.ReLU(), nn.Linear(48, dim))
        self.project_t = nn.Linear(dim, 8)
        self.project_f = nn.Linear(dim, 8)

    def forward(self, x):
        h_t = self.encoder_t(x)
        h_f = self.encoder_f(torch.fft.rfft(x).abs() / 6)
        return h_t, h_f, self.project_t(h_t), self.project_f(h_f)


def contrast(a, b, temperature=0.2):
    logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).t() / temperature
    return F.cross_entropy(logits, torch.arange(len(a)))


def signals(n=48, length=32):
    t = torch.arange(length) / length * 6.2832
    freq = torch.randint(1, 9, (n, 1)).float()
    amp = 0.5 + torch.rand(n, 1) * 2
    return amp * torch.sin(freq * t + torch.rand(n, 1) * 6.2832)


def augment(x):
    return x + 0.1 * torch.randn_like(x)


def pretrain(model, steps=30, lam=0.2):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        x = signals()
        h_t, h_f, z_t, z_f = model(x)
        h_t2, h_f2, z_t2, z_f2 = model(augment(x))
        loss_t = contrast(h_t, h_t2)
        loss_f = contrast(h_f, h_f2)
        loss_c = contrast(z_t, z_f) + contrast(z_t2, z_f2)
        loss = lam * (loss_t + loss_f)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:2d} t {loss_t.item():.3f} f {loss_f.item():.3f} c {loss_c.item():.3f}")


pretrain(TFModel())
