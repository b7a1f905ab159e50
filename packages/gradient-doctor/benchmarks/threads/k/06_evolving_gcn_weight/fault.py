import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)
NODES, DIM, STEPS = 30, 8, 6


class GraphConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = None

    def forward(self, x, adj):
        return adj @ x @ self.weight


class EvolveGCN(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.initial_weight = nn.Parameter(torch.empty(dim, dim))
        nn.init.xavier_uniform_(self.initial_weight)
        self.recurrent = nn.GRU(dim, dim)
        self.conv = GraphConv()
        self.readout = nn.Linear(dim, 1)

    def forward(self, snapshots, adj):
        w = self.initial_weight.unsqueeze(0)
        outputs = []
        for x in snapshots:
            w, _ = self.recurrent(w, w)
            self.conv.weight = nn.Parameter(w.squeeze(0))
            h = torch.tanh(self.conv(x, adj))
            outputs.append(self.readout(h).squeeze(-1))
        return torch.stack(outputs)


def normalised_graph():
    adj = (torch.rand(NODES, NODES) < 0.15).float()
    adj = ((adj + adj.t() + torch.eye(NODES)) > 0).float()
    return adj / adj.sum(1, keepdim=True)


adj = normalised_graph()
features = torch.randn(STEPS, NODES, DIM)
mixing = torch.randn(DIM, 2)
hidden = adj @ features @ mixing
targets = torch.tanh(hidden[..., 0]) * torch.tanh(hidden[..., 1])

model = EvolveGCN(DIM)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(200):
    cost = F.mse_loss(model(features, adj), targets)
    optimizer.zero_grad()
    cost.backward()
    optimizer.step()
    if epoch % 40 == 39:
        print(f"epoch {epoch + 1}  mse {cost.item():.4f}")
