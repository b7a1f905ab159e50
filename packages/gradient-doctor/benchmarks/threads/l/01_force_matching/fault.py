import torch
from torch import nn

torch.manual_seed(0)


def reference_energy(pos):
    d = torch.cdist(pos, pos) + 10.0 * torch.eye(pos.shape[1])
    return (torch.exp(-2.0 * (d - 1.0)) - 2.0 * torch.exp(-(d - 1.0))).sum((1, 2)) * 0.5


class PairPotential(nn.Module):
    def __init__(self, n_rbf=16, hidden=32):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.3, 4.0, n_rbf))
        self.net = nn.Sequential(nn.Linear(n_rbf, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, pos):
        n = pos.shape[1]
        i, j = torch.triu_indices(n, n, offset=1)
        dist = (pos[:, i] - pos[:, j]).norm(dim=-1)
        rbf = torch.exp(-4.0 * (dist.unsqueeze(-1) - self.centers) ** 2)
        return self.net(rbf).sum((1, 2))


class CalculateProperties(nn.Module):
    def forward(self, model, pos):
        pos = pos.detach().requires_grad_(True)
        energy = model(pos)
        grad = torch.autograd.grad(
            energy.sum(),
            pos,
            create_graph=False,
            retain_graph=True,
        )[0]
        return {"energy": energy, "force": -grad}


def make_data(n=256, atoms=5):
    pos = torch.randn(n, atoms, 3) * 1.2
    pos.requires_grad_(True)
    e = reference_energy(pos)
    f = -torch.autograd.grad(e.sum(), pos)[0]
    return pos.detach(), e.detach(), f.clamp(-5, 5)


pos, e_ref, f_ref = make_data()
model = PairPotential()
props = CalculateProperties()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
weights = {"energy": 0.001, "force": 1.0}

for epoch in range(30):
    order = torch.randperm(len(pos))
    log = {"energy": 0.0, "force": 0.0}
    for idx in order.split(32):
        pred = props(model, pos[idx])
        terms = {
            "energy": (pred["energy"] - e_ref[idx]).pow(2).mean(),
            "force": (pred["force"] - f_ref[idx]).pow(2).sum(-1).mean(),
        }
        loss = sum(weights[k] * v for k, v in terms.items())
        opt.zero_grad()
        loss.backward()
        opt.step()
        for k, v in terms.items():
            log[k] += v.item() / 8
    if epoch % 5 == 4:
        print(f"epoch {epoch + 1:2d}  energy mse {log['energy']:8.3f}  force mse {log['force']:8.4f}")
