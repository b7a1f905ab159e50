import torch
from torch import nn

torch.manual_seed(0)
KINDS = 4


class EquivariantLayer(nn.Module):
    """Messages from both atoms, their distance and the kind of the bond."""

    def __init__(self, dim=24, edge_dim=8):
        super().__init__()
        self.distance = nn.Sequential(nn.Linear(1, edge_dim), nn.SiLU(), nn.Linear(edge_dim, edge_dim))
        self.bond = nn.Embedding(KINDS, edge_dim)
        self.message = nn.Sequential(nn.Linear(2 * dim + edge_dim, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU())
        self.node = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, h, pos, edge_index, kind=None):
        src, dst = edge_index
        rel = (pos[src] - pos[dst]).square().sum(-1, keepdim=True)
        rel_feats = self.distance(rel)
        edge_feats = rel_feats if kind is None else rel_feats + self.bond(kind)
        m = self.message(torch.cat([h[src], h[dst], edge_feats], dim=-1))
        agg = torch.zeros_like(h).index_add(0, dst, m)
        return h + self.node(torch.cat([h, agg], dim=-1))


class MoleculeNet(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.atoms = nn.Embedding(5, dim)
        self.layers = nn.ModuleList([EquivariantLayer(dim) for _ in range(2)])
        self.out = nn.Linear(dim, 1)

    def forward(self, z, pos, edge_index, kind, batch, n_graphs):
        h = self.atoms(z)
        for layer in self.layers:
            h = layer(h, pos, edge_index, kind)
        pooled = torch.zeros(n_graphs, h.shape[1]).index_add(0, batch, h)
        return self.out(pooled).squeeze(-1)


STRENGTH = torch.tensor([0.2, 1.5, -1.0, 0.7])


def molecules(n_graphs=32, atoms=6):
    z = torch.randint(0, 5, (n_graphs * atoms,))
    pos = torch.randn(n_graphs * atoms, 3)
    ring = torch.arange(n_graphs * atoms)
    step = ring - ring % atoms + (ring + 1) % atoms
    kind = torch.randint(0, KINDS, (n_graphs * atoms,))
    edge_index = torch.stack([torch.cat([ring, step]), torch.cat([step, ring])])
    batch = ring // atoms
    energy = torch.zeros(n_graphs).index_add(0, batch, STRENGTH[kind])
    return z, pos, edge_index, kind.repeat(2), batch, energy


model = MoleculeNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(300):
    z, pos, edge_index, kind, batch, energy = molecules()
    energy_hat = model(z, pos, edge_index, kind, batch, len(energy))
    loss = (energy_hat - energy).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 or step == 299:
        print(f"{step:4d}  mae {loss.item():.4f}")
