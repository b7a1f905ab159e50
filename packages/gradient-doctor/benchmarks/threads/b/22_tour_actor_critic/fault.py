import torch
import torch.nn as nn

torch.manual_seed(21)
CITIES, BATCH, DIM = 8, 64, 32


class PointerActor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(2, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.query = nn.Linear(DIM, DIM)

    def forward(self, xy):
        h = self.encode(xy)
        mask = torch.zeros(xy.size(0), CITIES, dtype=torch.bool)
        cur = h.mean(1)
        tour, logp = [], 0.0
        for _ in range(CITIES):
            score = (h @ self.query(cur).unsqueeze(-1)).squeeze(-1) / DIM ** 0.5
            dist = torch.distributions.Categorical(logits=score.masked_fill(mask, -1e9))
            pick = dist.sample()
            logp = logp + dist.log_prob(pick)
            mask = mask.scatter(1, pick.unsqueeze(1), True)
            cur = h[torch.arange(xy.size(0)), pick]
            tour.append(pick)
        return torch.stack(tour, 1), logp


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * CITIES, DIM), nn.ReLU(), nn.Linear(DIM, 1))

    def forward(self, xy):
        return self.net(xy.flatten(1)).squeeze(-1)


def tour_length(xy, tour):
    path = xy.gather(1, tour.unsqueeze(-1).expand(-1, -1, 2))
    return (path - path.roll(1, dims=1)).norm(dim=-1).sum(1)


def train():
    actor, critic = PointerActor(), Critic()
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)
    for step in range(30):
        xy = torch.rand(BATCH, CITIES, 2)
        tour, logp = actor(xy)
        length = tour_length(xy, tour)
        value = critic(xy)
        actor_loss = ((length - value) * logp).mean()
        critic_loss = (length - value).pow(2).mean()
        loss = actor_loss + critic_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 5:
            print(f"step {step} loss {loss.item():.4f} length {length.mean().item():.3f} baseline {value.mean().item():.3f}")


if __name__ == "__main__":
    train()
