import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
PATCH, MARGIN = 32, 0.5


class PatchEncoder(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 16, 5, padding=2), nn.ReLU())
        self.proj = nn.Linear(16, d)
        self.order = nn.Linear(2 * d, 2)

    def forward(self, x):
        h = self.conv(x.unsqueeze(1)).mean(-1)
        return self.proj(h)


def series(n=4000):
    t = torch.arange(n) / 20.0
    regime = (torch.arange(n) // 400) % 5
    freq = 1.0 + regime.float()
    return torch.sin(freq * t) * (1 + 0.3 * regime.float()) + 0.1 * torch.randn(n)


def patches(signal, start):
    return torch.stack([signal[s:s + PATCH] for s in start.tolist()])


def triplet_loss(z_a, z_p):
    z_a, z_p = F.normalize(z_a, dim=1), F.normalize(z_p, dim=1)
    pos_sims = (z_a * z_p).sum(1)
    sim_ap = z_a @ z_p.T
    sim_f = sim_ap.clone()
    sim_f.diagonal().fill_(-float("inf"))
    neg_dists = 1 - sim_f
    hard_neg_dists, _ = torch.max(neg_dists, dim=1)
    pos_dists = 1 - pos_sims
    return F.relu(pos_dists - hard_neg_dists + MARGIN).mean()


def separation(model, signal):
    with torch.no_grad():
        start = torch.randint(0, len(signal) - PATCH - 4, (200,))
        z = F.normalize(model(patches(signal, start)), dim=1)
        near = F.normalize(model(patches(signal, start + 3)), dim=1)
        sim = z @ near.T
        return sim.diagonal().mean().item() - sim.mean().item()


signal = series()
model = PatchEncoder()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(201):
    start = torch.randint(8, len(signal) - 3 * PATCH, (48,))
    z_a = model(patches(signal, start))
    z_p = model(patches(signal, start + 2))
    z_next = model(patches(signal, start + PATCH))
    t_loss = triplet_loss(z_a, z_p)
    swap = torch.rand(48) < 0.5
    pair = torch.where(swap[:, None], torch.cat([z_next, z_a], 1), torch.cat([z_a, z_next], 1))
    pretext_loss = F.cross_entropy(model.order(pair), swap.long())
    loss = t_loss + 0.1 * pretext_loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 40 == 0:
        print(f"step {step}  triplet {t_loss.item():.4f}  pretext {pretext_loss.item():.4f}  separation {separation(model, signal):.3f}")
