import torch
import torch.nn as nn

torch.manual_seed(1)
BATCH, IDEAS, POINTS = 64, 5, 15
LR_G = LR_D = 1e-3
GRID = torch.linspace(-1, 1, POINTS).expand(BATCH, POINTS)


def master_lines():
    a = torch.rand(BATCH, 1) + 1.0
    return a * GRID ** 2 + a - 1.0


G = nn.Sequential(nn.Linear(IDEAS, 64), nn.ReLU(), nn.Linear(64, POINTS))
D = nn.Sequential(nn.Linear(POINTS, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
opt_D = torch.optim.Adam(D.parameters(), lr=LR_D)
opt_G = torch.optim.Adam(G.parameters(), lr=LR_G)

for step in range(601):
    real = master_lines()
    fake = G(torch.randn(BATCH, IDEAS))

    p_real = D(real)
    p_fake = D(fake)
    D_loss = -torch.mean(torch.log(p_real + 1e-6) + torch.log(1.0 - p_fake + 1e-6))
    G_loss = -torch.mean(torch.log(p_fake + 1e-6))

    opt_D.zero_grad()
    D_loss.backward(retain_graph=True)
    opt_D.step()

    opt_G.zero_grad()
    G_loss.backward()
    opt_G.step()

    if step % 100 == 0:
        gap = (fake.mean(0) - real.mean(0)).abs().mean()
        print(f"{step:4d} D {D_loss.item():.3f} G {G_loss.item():.3f} distance of the mean curve {gap.item():.3f}")
