import torch
import torch.nn as nn

torch.manual_seed(29)
NODES, FEAT, SNAPSHOTS = 12, 6, 5


class EvolvingConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.initial = nn.Parameter(torch.randn(FEAT, FEAT) / FEAT ** 0.5)
        self.gru = nn.GRU(FEAT, FEAT)
        self.evolved = None

    def forward(self, x, adj):
        w = self.initial if self.evolved is None else self.evolved
        out, _ = self.gru(w.unsqueeze(0), w.unsqueeze(0))
        self.evolved = out.squeeze(0)
        return adj @ x @ self.evolved


class RecurrentGCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = EvolvingConv()
        self.linear = nn.Linear(FEAT, 1)

    def forward(self, x, adj):
        return self.linear(torch.relu(self.conv(x, adj)))


def dataset():
    adj = (torch.rand(NODES, NODES) < 0.3).float() + torch.eye(NODES)
    adj = adj / adj.sum(1, keepdim=True)
    w = torch.randn(FEAT, 1)
    for _ in range(SNAPSHOTS):
        x = torch.randn(NODES, FEAT)
        yield x, adj, adj @ x @ w


def train():
    data = list(dataset())
    model = RecurrentGCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.train()
    for epoch in range(20):
        cost = 0.0
        for x, adj, y in data:
            cost = cost + (model(x, adj) - y).pow(2).mean()
        cost = cost / SNAPSHOTS
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        if epoch % 4 == 0:
            print(f"epoch {epoch} loss {cost.item():.4f}")


if __name__ == "__main__":
    train()
