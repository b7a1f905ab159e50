import torch
import torch.nn as nn

torch.manual_seed(9)

SITES = 12


class Runoff(nn.Module):
    """Predicts the dissolved mass at each site of a catchment."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1), nn.Softplus())

    def forward(self, features, volume):
        mass = self.net(features).squeeze(-1) * volume
        conc = torch.zeros(SITES)
        for i in range(SITES):
            conc[i] = mass[i] / volume[i]
        return conc


features = torch.randn(40, SITES, 3)
volume = 0.5 + torch.rand(40, SITES)
volume[torch.rand(40, SITES) < 0.1] = 0.0           # dried out that day
measured = torch.exp(0.4 * features[..., 0]) + 0.2 * features[..., 1] ** 2

model = Runoff()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)

for epoch in range(6):
    total, seen = 0.0, 0
    for day in range(40):
        conc = model(features[day], volume[day])
        wet = volume[day] > 0
        loss = ((conc[wet] - measured[day][wet]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
        seen += 1
    print(f"epoch {epoch}  mse {total / seen:.4f}")
