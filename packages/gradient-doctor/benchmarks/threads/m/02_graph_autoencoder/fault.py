import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)


class GraphConv(nn.Module):
    def __init__(self, fin, fout):
        super().__init__()
        self.lin = nn.Linear(fin, fout)

    def forward(self, x, adj):
        return adj @ self.lin(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GraphConv(3, 16)
        self.conv2 = GraphConv(16, 3)

    def forward(self, x, adj):
        h = torch.tanh(self.conv1(x, adj))
        return self.conv2(h, adj)


def random_graph(nodes):
    pos = torch.rand(nodes, 3)
    adj = (torch.cdist(pos, pos) < 0.35).float()
    adj.fill_diagonal_(1.0)
    deg = adj.sum(1)
    return pos, adj / torch.sqrt(deg[:, None] * deg[None, :])


graphs = [random_graph(int(n)) for n in torch.randint(12, 24, (20,))]
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(30):
    running_loss = 0.0
    for x, adj in graphs:
        optimizer.zero_grad()
        out = model(x, adj)
        loss = F.mse_loss(x, x)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    if epoch % 5 == 4:
        print(f"epoch {epoch + 1}: loss {running_loss / len(graphs):.4f}")
