import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def set_requires_grad(module, val):
    for p in module.parameters():
        p.requires_grad = val


class AudioNTT(nn.Module):
    """Log-mel spectrogram to embedding."""

    def __init__(self, n_mels=16, d=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Sequential(nn.Linear(8 * n_mels // 4, d), nn.ReLU())

    def forward(self, x):
        x = self.features(x).permute(0, 3, 1, 2).flatten(2)
        x = self.fc(x)
        return x.mean(1) + x.amax(1)


class Task(nn.Module):
    def __init__(self, encoder, d=32, classes=8):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(d, classes)

    def forward(self, x):
        return self.head(self.encoder(x))


def clips(n=32, frames=20, classes=8):
    """A class is a chirp: where it starts and whether it goes up or down."""
    y = torch.randint(0, classes, (n,))
    start, slope = (y // 2) * 2 + 4, (y % 2) * 2 - 1
    t0 = torch.randint(0, frames - 5, (n,))
    x = torch.randn(n, 1, 16, frames)
    for i in range(n):
        for k in range(5):
            x[i, 0, (start[i] + slope[i] * k) % 16, t0[i] + k] += 2.5
    return x, y


def run(task, name, steps, lr):
    params = [p for p in task.parameters() if p.requires_grad]
    opt = torch.optim.Adam(params, lr=lr)
    loss_sum, hits = 0.0, 0.0
    for step in range(1, steps + 1):
        x, y = clips()
        logits = task(x)
        loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss_sum, hits = loss_sum + loss.item(), hits + (logits.argmax(1) == y).float().mean().item()
        if step % 50 == 0:
            print(f"{name} step {step} loss {loss_sum / 50:.3f} acc {hits / 50:.3f}")
            loss_sum, hits = 0.0, 0.0


encoder = AudioNTT()
task = Task(encoder)
set_requires_grad(encoder, False)
run(task, "linear  ", 50, 1e-2)
set_requires_grad(encoder, True)
run(task, "finetune", 200, 3e-3)
