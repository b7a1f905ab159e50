import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(6)
NODES, FEATS = 12, 5


class GraphConv(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * (1.0 / n_in) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, adj, x):
        return adj @ (x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, n_layers, n_feat, hidden, n_class):
        super().__init__()
        self.layers = []
        for i in range(n_layers):
            self.layers.append(GraphConv(n_feat if i == 0 else hidden, hidden))
        self.fc1 = nn.Linear(hidden, 4)
        self.fc2 = nn.Linear(4, n_class)

    def forward(self, adj, x):
        for layer in self.layers:
            x = F.relu(layer(adj, x))
        x = x.mean(dim=1)
        return self.fc2(F.relu(self.fc1(x)))


def graphs(n):
    """Class 1: neighbours tend to share the sign of feature 0."""
    y = torch.randint(0, 2, (n,))
    x = torch.randn(n, NODES, FEATS)
    same = (x[:, :, None, 0] * x[:, None, :, 0] > 0).float()
    p = torch.where(y[:, None, None] == 1, 0.1 + 0.5 * same, 0.6 - 0.5 * same)
    up = torch.triu((torch.rand(n, NODES, NODES) < p).float(), 1)
    adj = up + up.transpose(1, 2) + torch.eye(NODES)
    return adj / adj.sum(-1, keepdim=True), x, y


adj, x, y = graphs(400)
model = GCN(n_layers=2, n_feat=FEATS, hidden=4, n_class=2)
print("trainable parameters:", sum(p.numel() for p in model.parameters()))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
start = model.layers[0].weight.detach().clone()
for epoch in range(201):
    out = model(adj, x)
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 40 == 0:
        acc = (out.argmax(1) == y).float().mean().item()
        moved = (model.layers[0].weight.detach() - start).abs().max().item()
        print(f"epoch {epoch} loss {loss.item():.4f} acc {acc:.3f} first layer moved {moved:.4f}")
