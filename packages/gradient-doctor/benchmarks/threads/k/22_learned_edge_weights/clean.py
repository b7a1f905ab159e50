import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
NODES, FEATURES, CLASSES = 60, 12, 3


def gcn_norm(adj):
    row, col = adj._indices()
    value = adj.values()
    degree = torch.zeros(adj.size(0)).index_add(0, row, value)
    inv_sqrt = degree.clamp(min=1e-6).pow(-0.5)
    value = inv_sqrt[row] * value * inv_sqrt[col]
    return torch.sparse_coo_tensor(torch.stack([row, col]), value, adj.shape).coalesce()


class GCN(nn.Module):
    def __init__(self, edge_index):
        super().__init__()
        self.register_buffer("edge_index", edge_index)
        self.edge_logit = nn.Parameter(torch.zeros(edge_index.size(1)))
        self.lin = nn.Linear(FEATURES, CLASSES)

    def edge_weight(self):
        return torch.sigmoid(self.edge_logit)

    def forward(self, x):
        adj = torch.sparse_coo_tensor(self.edge_index, self.edge_weight(), (NODES, NODES)).coalesce()
        return torch.sparse.mm(gcn_norm(adj), self.lin(x))


def community_graph():
    group = torch.arange(NODES) % CLASSES
    draw = torch.rand(NODES, NODES)
    same = group.unsqueeze(0) == group.unsqueeze(1)
    dense = torch.where(same, draw < 0.15, draw < 0.25)
    dense.fill_diagonal_(True)
    return dense.nonzero().t().contiguous(), group


edge_index, group = community_graph()
x = F.one_hot(group, FEATURES).float() + 0.7 * torch.randn(NODES, FEATURES)
model = GCN(edge_index)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
inside = group[edge_index[0]] == group[edge_index[1]]

for epoch in range(161):
    loss = F.cross_entropy(model(x), group)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 40 == 0:
        w = model.edge_weight().detach()
        print(f"epoch {epoch:3d}  loss {loss.item():.4f}  edge weight inside {w[inside].mean():.3f}  across {w[~inside].mean():.3f}")
