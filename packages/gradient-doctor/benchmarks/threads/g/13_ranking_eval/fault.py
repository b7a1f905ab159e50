import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(21)


class VSE(nn.Module):
    """Joint embedding of image features and sentence features."""

    def __init__(self, d_img=40, d_txt=30, dim=64):
        super().__init__()
        self.img = nn.Sequential(nn.Linear(d_img, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, dim))
        self.txt = nn.Sequential(nn.Linear(d_txt, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, dim))

    def forward(self, i, t):
        return F.normalize(self.img(i), dim=1), F.normalize(self.txt(t), dim=1)


def nce(a, b):
    scores = a @ b.t() / 0.1
    return F.cross_entropy(scores, torch.arange(len(a)))


def validate(model, i, t):
    model.eval()
    with torch.no_grad():
        loss = nce(*model(i, t)).item()
    return loss


def pairs(n, gen):
    z = torch.randn(n, 6, generator=gen)
    i = z @ A + 1.0 * torch.randn(n, 40, generator=gen)
    t = z @ B + 1.0 * torch.randn(n, 30, generator=gen)
    return i, t


gen = torch.Generator().manual_seed(5)
A, B = torch.randn(6, 40, generator=gen), torch.randn(6, 30, generator=gen)
ti, tt = pairs(160, gen)
vi, vt = pairs(160, gen)

model = VSE()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
iters = 0
for epoch in range(8):
    model.train()
    with_dropout = 0
    for start in list(range(0, 160, 32)) * 6:
        loss = nce(*model(ti[start:start + 32], tt[start:start + 32]))
        opt.zero_grad()
        loss.backward()
        opt.step()
        with_dropout += int(model.training)
        iters += 1
        if iters % 6 == 0:
            val = validate(model, vi, vt)
    print(f"epoch {epoch}  train {loss.item():.4f}  val {val:.4f}  steps with dropout {with_dropout}/30")
