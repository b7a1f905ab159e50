import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(41)


def normalised(adj):
    adj = adj + torch.eye(len(adj))
    d = adj.sum(1).rsqrt()
    return d[:, None] * adj * d[None, :]


class GraphConv(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.lin = nn.Linear(n_in, n_out)

    def forward(self, a, x):
        return a @ self.lin(x)


class AnswerGCN(nn.Module):
    """Scores every node of the entity graph for each kind of answer."""

    def __init__(self, feats, kinds, hidden=32):
        super().__init__()
        self.gc1 = GraphConv(feats, hidden)
        self.gc2 = GraphConv(hidden, hidden)
        self.out = nn.Linear(hidden, kinds)

    def forward(self, a, x):
        h = F.relu(self.gc1(a, x))
        h = F.relu(self.gc2(a, h))
        return F.softmax(self.out(h), dim=-1)


n, kinds = 120, 6
kind = torch.randint(0, kinds, (n,))
same = kind[:, None] == kind[None, :]
adj = torch.bernoulli(torch.where(same, 0.3, 0.02))
adj = torch.triu(adj, 1)
a = normalised(adj + adj.t())
x = F.one_hot(kind, kinds).float() + 0.7 * torch.randn(n, kinds)

model = AnswerGCN(kinds, kinds)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(150):
    optimizer.zero_grad()
    pred = model(a, x)
    loss = loss_fn(pred, kind)
    loss.backward()
    optimizer.step()
    if epoch % 30 == 0 or epoch == 149:
        acc = (pred.argmax(1) == kind).float().mean().item()
        print(f"epoch {epoch:3d}  loss {loss.item():.4f}  acc {acc:.2f}")
