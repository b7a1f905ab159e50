import torch
import torch.nn as nn

torch.manual_seed(0)
MAX_ATOMS = 6


def molecules(n):
    counts = torch.randint(3, MAX_ATOMS + 1, (n,))
    atoms = torch.arange(MAX_ATOMS)[None] < counts[:, None]
    grid = torch.stack(torch.meshgrid(*[torch.arange(2.0)] * 3, indexing="ij"), -1).view(-1, 3)
    pos = (grid[:MAX_ATOMS] + 0.1 * torch.randn(n, MAX_ATOMS, 3)) * atoms[..., None]
    pairs = atoms[:, :, None] & atoms[:, None, :] & ~torch.eye(MAX_ATOMS, dtype=torch.bool)
    return pos, pairs


def pair_distances(pos, pairs):
    diff = pos[:, :, None] - pos[:, None, :]
    dist = diff.pow(2).sum(-1).sqrt()
    return dist * pairs


class PairPotential(nn.Module):
    def __init__(self, n_basis=16, cutoff=3.0):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0, cutoff, n_basis))
        self.mlp = nn.Sequential(nn.Linear(n_basis, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, pos, pairs):
        dist = pair_distances(pos, pairs)
        basis = torch.exp(-8 * (dist[..., None] - self.centers) ** 2)
        energy = self.mlp(basis).squeeze(-1) * pairs
        return 0.5 * energy.sum((1, 2))


def reference(pos, pairs):
    diff = pos[:, :, None] - pos[:, None, :]
    r2 = diff.pow(2).sum(-1) + (~pairs).float()
    energy = 0.5 * (torch.exp(-r2) * pairs).sum((1, 2))
    forces = (2 * torch.exp(-r2)[..., None] * diff * pairs[..., None]).sum(2)
    return energy, forces


model = PairPotential()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(121):
    pos, pairs = molecules(16)
    energy_ref, forces_ref = reference(pos, pairs)
    pos.requires_grad_(True)
    energy = model(pos, pairs)
    forces = -torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]
    loss = (energy - energy_ref).pow(2).mean() + 5 * (forces - forces_ref).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
