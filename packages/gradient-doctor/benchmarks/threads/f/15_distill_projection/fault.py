import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)
CATEGORIES = ["bottle", "cable", "capsule", "carpet"]
DIM = 12


class Projection(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, DIM))

    def forward(self, f):
        return f + self.inner(f)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottleneck = nn.Linear(DIM, 16)
        self.decoder = nn.Sequential(nn.GELU(), nn.Linear(16, 48), nn.GELU(), nn.Linear(48, DIM))

    def forward(self, f):
        return self.decoder(self.bottleneck(f))


# what a frozen teacher would give: features of each category around its own directions
axes = {c: torch.randn(3, DIM) for c in CATEGORIES}


def features(category, n=24):
    return torch.randn(n, 3) @ axes[category] / 2


proj, student = Projection(), Student()
optimizer_proj = torch.optim.SGD(proj.parameters(), lr=0.05, momentum=0.9)
optimizer_distill = torch.optim.SGD(student.parameters(), lr=0.2, momentum=0.9)
accumulation_steps = len(CATEGORIES)


def losses(f):
    noisy = f + 0.3 * torch.randn_like(f)
    denoised = proj(noisy)
    loss_proj = F.mse_loss(denoised, f)
    loss_distill = (1 - F.cosine_similarity(student(denoised.detach()), f)).mean()
    return loss_proj, loss_distill


for i in range(1600):
    category = CATEGORIES[i % len(CATEGORIES)]
    loss_proj, loss_distill = losses(features(category))
    loss = (loss_proj + loss_distill) / accumulation_steps

    optimizer_proj.zero_grad()
    optimizer_distill.zero_grad()
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer_proj.step()
        optimizer_distill.step()

    if (i + 1) % 400 == 0:
        with torch.no_grad():
            row = {c: losses(features(c, 200))[1].item() for c in CATEGORIES}
        print(f"iter {i + 1} distillation:", ", ".join(f"{c} {v:.3f}" for c, v in row.items()))
