import torch
import torch.nn as nn


def bond_geometry(pos, src, dst):
    vec = pos[:, dst] - pos[:, src]
    return vec, vec.norm(dim=-1)


def line_graph(vec, dist, first, second):
    """Angles between pairs of bonds that share an atom."""
    cos = (vec[:, first] * vec[:, second]).sum(-1) / (dist[:, first] * dist[:, second])
    return cos


class Potential(nn.Module):
    def __init__(self, n_atoms=4, hidden=32):
        super().__init__()
        pairs = [(i, j) for i in range(n_atoms) for j in range(n_atoms) if i != j]
        self.src = torch.tensor([p[0] for p in pairs])
        self.dst = torch.tensor([p[1] for p in pairs])
        trip = [(a, b) for a in range(len(pairs)) for b in range(a + 1, len(pairs)) if pairs[a][0] == pairs[b][0]]
        self.first = torch.tensor([t[0] for t in trip])
        self.second = torch.tensor([t[1] for t in trip])
        self.two_body = nn.Sequential(nn.Linear(1, hidden), nn.SiLU(), nn.Linear(hidden, 1))
        self.three_body = nn.Sequential(nn.Linear(3, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def energy(self, pos):
        vec, dist = bond_geometry(pos, self.src, self.dst)
        cos = line_graph(vec, dist, self.first, self.second)
        e2 = self.two_body(dist.unsqueeze(-1)).sum((1, 2))
        feats = torch.stack([cos, dist[:, self.first], dist[:, self.second]], -1)
        e3 = self.three_body(feats).sum((1, 2))
        return e2 + e3

    def forward(self, pos):
        pos = pos.detach().requires_grad_(True)
        energy = self.energy(pos)
        forces = -torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]
        return energy, forces


def reference(pos, model):
    pos = pos.detach().requires_grad_(True)
    vec, dist = bond_geometry(pos, model.src, model.dst)
    cos = line_graph(vec, dist, model.first, model.second)
    energy = (dist - 1.4).pow(2).sum(1) * 0.2 + (cos + 0.3).pow(2).sum(1)
    forces = -torch.autograd.grad(energy.sum(), pos)[0]
    return energy.detach(), forces


def main():
    torch.manual_seed(0)
    model = Potential()
    base = torch.tensor([[0., 0, 0], [1.4, 0, 0], [0, 1.4, 0], [0, 0, 1.4]])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(1, 301):
        pos = base + 0.2 * torch.randn(16, 4, 3)
        e_ref, f_ref = reference(pos, model)
        e, f = model(pos)
        loss_e, loss_f = (e - e_ref).pow(2).mean(), (f - f_ref).pow(2).mean()
        optimizer.zero_grad()
        (0.1 * loss_e + loss_f).backward()
        optimizer.step()
        if step % 60 == 0:
            print(f"step {step}  energy mse {loss_e.item():.4f}  force mse {loss_f.item():.4f}")


if __name__ == "__main__":
    main()
