import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(1)
np.random.seed(1)

# Hyper Parameters
BATCH = 64
LR_G = 1e-3
LR_D = 5e-3
IDEAS = 5
POINTS = np.vstack([np.linspace(-1, 1, 15) for _ in range(BATCH)])


def artist_works():
    a = np.random.uniform(1, 2, size=BATCH)[:, np.newaxis]
    paintings = a * np.power(POINTS, 2) + (a - 1)
    return torch.from_numpy(paintings).float()


G = nn.Sequential(
    nn.Linear(IDEAS, 64),
    nn.ReLU(),
    nn.Linear(64, 15),
)

D = nn.Sequential(
    nn.Linear(15, 64),
    nn.ReLU(),
    nn.Linear(64, 1),
    nn.Sigmoid(),
)

opt_D = torch.optim.Adam(D.parameters(), lr=LR_D)
opt_G = torch.optim.Adam(G.parameters(), lr=LR_G)

for step in range(401):
    real = artist_works()
    ideas = torch.randn(BATCH, IDEAS)
    fake = G(ideas)

    prob_real = D(real)
    prob_fake = D(fake)

    D_loss = -torch.mean(torch.log(prob_real) + torch.log(1.0 - prob_fake))
    opt_D.zero_grad()
    D_loss.backward(retain_graph=True)
    opt_D.step()

    G_loss = torch.mean(torch.log(1.0 - D(fake)))
    opt_G.zero_grad()
    G_loss.backward()
    opt_G.step()

    if step % 80 == 0:
        gap = (fake.mean(0) - real.mean(0)).abs().mean().item()
        print("step %d  D accuracy %.2f  D score %.2f  distance of the mean curves %.3f"
              % (step, prob_real.data.mean(), -D_loss.item(), gap))
