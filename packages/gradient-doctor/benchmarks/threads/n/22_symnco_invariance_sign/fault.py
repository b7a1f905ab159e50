import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
N_AUG, CITIES, DIM = 2, 6, 32


def rotate(points):
    angle = 6.2832 * torch.rand(len(points), 1, 1)
    x, y = points[..., :1] - 0.5, points[..., 1:] - 0.5
    return torch.cat([angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y], -1) + 0.5


def invariance_loss(proj_embed, num_augment):
    """Similarity of the representations of the augmented copies; (n, augment, dim)."""
    first = proj_embed[:, :1].expand(-1, num_augment - 1, -1)
    similarity = F.cosine_similarity(first, proj_embed[:, 1:], dim=-1)
    return similarity.mean()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(2, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.mix = nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True)
        self.start = nn.Linear(DIM, 1)
        self.project = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, points):
        hidden = self.mix(self.embed(points))
        dist = torch.distributions.Categorical(logits=self.start(hidden).squeeze(-1))
        action = dist.sample()
        return action, dist.log_prob(action), self.project(hidden.mean(1))


def reward(points, action):
    chosen = points[torch.arange(len(points)), action]
    return -(points - chosen[:, None]).norm(dim=-1).mean(1)


def training_step(policy, optimizer, batch=64, alpha=0.2):
    points = torch.rand(batch, CITIES, 2)
    copies = torch.stack([points] + [rotate(points) for _ in range(N_AUG - 1)], 1)
    action, log_prob, proj = policy(copies.flatten(0, 1))
    r = reward(copies.flatten(0, 1), action).view(batch, N_AUG)
    advantage = r - r.mean(1, keepdim=True)
    loss_symmetric = -(advantage * log_prob.view(batch, N_AUG)).mean()
    loss_invariance = invariance_loss(proj.view(batch, N_AUG, -1), N_AUG)
    loss = loss_symmetric + alpha * loss_invariance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        distance = (F.normalize(proj.view(batch, N_AUG, -1), dim=-1).diff(dim=1)).norm(dim=-1).mean()
    return loss.item(), r.mean().item(), distance.item()


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-4)
for step in range(201):
    loss, r, distance = training_step(policy, optimizer)
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss:.4f}  reward {r:.4f}  distance of the copies {distance:.3f}")
