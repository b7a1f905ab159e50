import torch
import torch.nn as nn


class ScoreNet(nn.Module):
    def __init__(self, dim=2, width=64, p=0.3):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim + 1, width), nn.BatchNorm1d(width), nn.SiLU(), nn.Dropout(p),
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.SiLU(), nn.Dropout(p),
            nn.Linear(width, dim))

    def forward(self, x, sigma):
        return self.net(torch.cat([x, sigma.log()], 1)) / sigma


def two_rings(n):
    t = torch.rand(n) * 6.2832
    r = torch.where(torch.rand(n) < 0.5, 1.0, 3.0) + 0.05 * torch.randn(n)
    return torch.stack([r * t.cos(), r * t.sin()], 1)


def anneal_dsm_loss(score, x, sigmas):
    sigma = sigmas[torch.randint(len(sigmas), (x.size(0),))].unsqueeze(1)
    noise = torch.randn_like(x) * sigma
    target = -noise / sigma ** 2
    out = score(x + noise, sigma)
    return 0.5 * ((out - target) ** 2 * sigma ** 2).sum(1).mean()


class AnnealRunner:
    def __init__(self, n_iters=800, val_every=100, seed=0):
        torch.manual_seed(seed)
        self.n_iters, self.val_every = n_iters, val_every
        self.sigmas = torch.logspace(0.3, -1, 8)
        self.score = ScoreNet()
        self.optimizer = torch.optim.Adam(self.score.parameters(), lr=3e-3)
        self.train_x, self.test_x = two_rings(64), two_rings(1024)

    def train(self):
        self.score.train()
        for step in range(1, self.n_iters + 1):
            loss = anneal_dsm_loss(self.score, self.train_x, self.sigmas)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

            if step % self.val_every == 0:
                self.score.eval()
                with torch.no_grad():
                    test_loss = anneal_dsm_loss(self.score, self.test_x, self.sigmas)
                self.score.train()
                print(f"step {step}  dsm loss {loss.item():.4f}  test dsm loss {test_loss.item():.4f}")


if __name__ == "__main__":
    AnnealRunner().train()
