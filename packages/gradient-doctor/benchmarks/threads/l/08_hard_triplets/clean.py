import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

rng = np.random.default_rng(0)
torch.manual_seed(0)
N_ID, DIM = 20, 32
identities = torch.randn(N_ID, DIM)


class FaceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        return F.normalize(self.body(x), dim=1)


def sample_triplets(n):
    who = torch.from_numpy(rng.integers(0, N_ID, n))
    other = (who + torch.from_numpy(rng.integers(1, N_ID, n))) % N_ID
    noise = lambda: 0.8 * torch.randn(n, DIM)
    return identities[who] + noise(), identities[who] + noise(), identities[other] + noise()


def pairwise(a, b):
    return (a - b).pow(2).sum(1)


def select_hard(out_a, out_p, out_n, margin):
    d_p, d_n = pairwise(out_a, out_p), pairwise(out_a, out_n)
    all_hard = (d_n - d_p < margin).cpu().numpy().flatten()
    hard_triplets = np.where(all_hard == 1)[0]
    if len(hard_triplets) == 0:
        return None
    out_selected_a = out_a[hard_triplets]
    out_selected_p = out_p[hard_triplets]
    out_selected_n = out_n[hard_triplets]
    return out_selected_a, out_selected_p, out_selected_n


def triplet_loss(a, p, n, margin):
    return torch.clamp(margin + pairwise(a, p) - pairwise(a, n), min=0.0).mean()


model = FaceNet()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
margin = 0.5
for step in range(300):
    outs = [model(x) for x in sample_triplets(128)]
    selected = select_hard(*outs, margin)
    if selected is None:
        continue
    loss = triplet_loss(*selected, margin)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        with torch.no_grad():
            a, p, n = (model(x) for x in sample_triplets(1000))
        print(f"step {step}  hard triplet loss {loss.item():.4f}  verification accuracy {(pairwise(a, p) < pairwise(a, n)).float().mean().item():.3f}")
