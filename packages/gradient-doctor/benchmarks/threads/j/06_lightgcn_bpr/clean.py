import torch
import torch.nn as nn
import torch.nn.functional as F


class BPRLoss(nn.Module):
    def __init__(self, lambda_reg=1e-4):
        super().__init__()
        self.lambda_reg = lambda_reg

    def forward(self, positives, negatives, parameters):
        n_pairs = positives.size(0)
        log_prob = F.logsigmoid(positives - negatives).mean()
        regularization = self.lambda_reg * parameters.norm(p=2).pow(2)
        return -log_prob + regularization / n_pairs


class LightGCN(nn.Module):
    def __init__(self, num_nodes, dim, num_layers=2):
        super().__init__()
        self.embedding = nn.Embedding(num_nodes, dim)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.num_layers = num_layers

    def forward(self, adj):
        x = self.embedding.weight
        out = x
        for _ in range(self.num_layers):
            x = adj @ x
            out = out + x
        return out / (self.num_layers + 1)


def synthetic(users=60, items=80, groups=4):
    ug, ig = torch.arange(users) % groups, torch.arange(items) % groups
    prob = torch.where(ug[:, None] == ig[None, :], 0.4, 0.03)
    R = (torch.rand(users, items) < prob).float()
    A = torch.zeros(users + items, users + items)
    A[:users, users:] = R
    A[users:, :users] = R.t()
    d = A.sum(1).clamp(min=1).rsqrt()
    return R, d[:, None] * A * d[None, :]


def main(users=60, items=80, batch=512):
    torch.manual_seed(0)
    R, adj = synthetic(users, items)
    pos_u, pos_i = R.nonzero(as_tuple=True)
    model = LightGCN(users + items, 16)
    criterion = BPRLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)

    for epoch in range(1, 201):
        pick = torch.randint(0, len(pos_u), (batch,))
        u, i = pos_u[pick], pos_i[pick]
        j = torch.randint(0, items, (batch,))
        emb = model(adj)
        pos = (emb[u] * emb[users + i]).sum(1)
        neg = (emb[u] * emb[users + j]).sum(1)
        loss = criterion(pos, neg, model.embedding.weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 40 == 0:
            auc = (pos > neg).float().mean().item()
            print(f"epoch {epoch}  loss {loss.item():.6f}  pair accuracy {auc:.3f}")


if __name__ == "__main__":
    main()
