import torch
from torch import nn

torch.manual_seed(0)
N_USER, N_ITEM, DIM = 120, 200, 16


def make_interactions():
    u, i = torch.randn(N_USER, 4), torch.randn(N_ITEM, 4)
    score = u @ i.T + 0.3 * torch.randn(N_USER, N_ITEM)
    order = score.argsort(dim=1, descending=True)
    return order[:, :20], order[:, 20:26]


train_items, test_items = make_interactions()
rate = torch.zeros(N_USER, N_ITEM).scatter(1, train_items, 1.0)


class GraphRecommender(nn.Module):
    def __init__(self, rate, n_freq=24, reg=1e-3):
        super().__init__()
        adj = rate / rate.sum(1, keepdim=True).sqrt() / rate.sum(0, keepdim=True).clamp(min=1).sqrt()
        p, s, q = torch.svd_lowrank(adj, q=n_freq)
        self.register_buffer("user_filter", (p * torch.exp(s)) @ p.T)
        self.register_buffer("item_filter", (q * torch.exp(s)) @ q.T)
        self.user_emb = nn.Embedding(N_USER, DIM)
        self.item_emb = nn.Embedding(N_ITEM, DIM)
        nn.init.xavier_normal_(self.user_emb.weight)
        nn.init.xavier_normal_(self.item_emb.weight)
        self.reg = reg

    def forward(self, u, p, n):
        final_user = self.user_filter[u] @ self.user_emb.weight
        final_pos = self.item_filter[p] @ self.item_emb.weight
        final_nega = self.item_filter[n] @ self.item_emb.weight
        out = ((final_user * final_pos).sum(1) - (final_pos * final_nega).sum(1)).sigmoid()
        reg_term = self.reg * (final_user ** 2 + final_pos ** 2 + final_nega ** 2).sum()
        return (-torch.log(out).sum() + reg_term) / len(u)

    def predict(self):
        return self.user_filter @ self.user_emb.weight @ (self.item_filter @ self.item_emb.weight).T


def recall(model, k=20):
    with torch.no_grad():
        score = model.predict() - 1e6 * rate
    top = score.topk(k, dim=1).indices
    return (top[:, :, None] == test_items[:, None, :]).any(1).float().mean().item()


model = GraphRecommender(rate)
opt = torch.optim.SGD(model.parameters(), lr=4.0)
print(f"before training  recall@20 {recall(model):.3f}")
for epoch in range(8):
    total = 0.0
    for _ in range(20):
        u = torch.randint(0, N_USER, (256,))
        p = train_items[u, torch.randint(0, 20, (256,))]
        n = torch.randint(0, N_ITEM, (256,))
        loss = model(u, p, n)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() / 20
    print(f"epoch {epoch + 1}  bpr loss {total:.4f}  recall@20 {recall(model):.3f}")
