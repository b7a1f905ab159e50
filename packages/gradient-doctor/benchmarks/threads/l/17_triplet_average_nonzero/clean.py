import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
N_CLASS, DIM = 8, 16
centers = torch.randn(N_CLASS, DIM) * 0.5


def triplets_within(labels):
    same = labels[:, None] == labels[None, :]
    diff = ~same
    same.fill_diagonal_(False)
    return torch.where(same.unsqueeze(2) & diff.unsqueeze(1))


class TripletMarginLoss(nn.Module):
    def __init__(self, margin=0.1, avg_non_zero_only=True):
        super().__init__()
        self.margin, self.avg_non_zero_only = margin, avg_non_zero_only
        self.num_non_zero_triplets = 0

    def forward(self, embeddings, labels):
        a, p, n = triplets_within(labels)
        a_p = (embeddings[a] - embeddings[p]).pow(2).sum(1)
        a_n = (embeddings[a] - embeddings[n]).pow(2).sum(1)
        relued = F.relu(a_p - a_n + self.margin)
        self.num_non_zero_triplets = int((relued > 0).sum())
        if self.avg_non_zero_only and self.num_non_zero_triplets > 0:
            return relued.sum() / self.num_non_zero_triplets
        return relued.mean()


def sample(n):
    y = torch.randint(0, N_CLASS, (n,))
    return centers[y] + 0.35 * torch.randn(n, DIM), y


def nearest_neighbour_accuracy(model):
    with torch.no_grad():
        x, y = sample(200)
        z = F.normalize(model(x), dim=1)
        d = torch.cdist(z, z).fill_diagonal_(float("inf"))
        return (y[d.argmin(1)] == y).float().mean().item()


model = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 8))
loss_fn = TripletMarginLoss()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(401):
    x, y = sample(24)
    loss = loss_fn(F.normalize(model(x), dim=1), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        print(f"step {step}  loss {loss.item():.4f}  active triplets {loss_fn.num_non_zero_triplets}  accuracy {nearest_neighbour_accuracy(model):.3f}")
