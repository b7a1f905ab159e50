import torch
from torch import nn

torch.manual_seed(3)

N, LAGS = 20, 4


def make_graph(p=0.15):
    a = (torch.rand(N, N) < p).float()
    a = ((a + a.t()) > 0).float()
    a.fill_diagonal_(1.0)
    d = a.sum(1).pow(-0.5)
    return d[:, None] * a * d[None, :]


def make_signal(adj, steps=60):
    phase, speed = 6.28 * torch.rand(N), 0.2 + 0.3 * torch.rand(N)
    t = torch.arange(steps + LAGS)
    raw = torch.sin(speed * t[:, None] + phase)
    return 0.5 * raw + 0.5 * raw @ adj


class GraphGRU(nn.Module):
    def __init__(self, n_in, hidden):
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Linear(n_in + hidden, 2 * hidden)
        self.cand = nn.Linear(n_in + hidden, hidden)

    def forward(self, adj, x, h):
        z, r = torch.sigmoid(self.gates(adj @ torch.cat([x, h], 1))).chunk(2, 1)
        new = torch.tanh(self.cand(adj @ torch.cat([x, r * h], 1)))
        return z * h + (1 - z) * new


class RecurrentGCN(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = GraphGRU(LAGS, hidden)
        self.linear = nn.Linear(hidden + LAGS, 1)

    def forward(self, adj, x):
        h = self.rnn(adj, x, torch.zeros(N, self.rnn.hidden))
        return self.linear(torch.cat([torch.relu(h), x], 1))


adj = make_graph()
series = make_signal(adj)
snapshots = [(series[t : t + LAGS].t(), series[t + LAGS]) for t in range(60)]
train_part, test_part = snapshots[:45], snapshots[45:]

model = RecurrentGCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

model.train()
for epoch in range(60):
    cost = 0
    for time, (x, y) in enumerate(train_part):
        y_hat = model(adj, x)
        cost = cost + torch.mean((y_hat.squeeze(-1) - y) ** 2)
    cost = cost / (time + 1)
    cost.backward()
    optimizer.step()
    optimizer.zero_grad()
    if epoch % 15 == 14:
        print(f"epoch {epoch + 1} cost {cost.item():.4f}")

model.eval()
with torch.no_grad():
    err = sum((model(adj, x).flatten() - y).pow(2).mean() for x, y in test_part) / len(test_part)
print(f"test mse {err.item():.4f}, variance of the target {series.var().item():.4f}")
