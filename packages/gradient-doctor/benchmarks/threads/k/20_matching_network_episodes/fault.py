import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(8)
WAYS, SHOTS, QUERIES, DIM = 5, 2, 6, 24


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, 48), nn.ReLU(), nn.Linear(48, 24))

    def forward(self, x):
        return self.layers(x)


class AttentionalClassify(nn.Module):
    def forward(self, similarities, support_y):
        attention = torch.softmax(similarities, dim=-1)
        return attention @ support_y


class MatchingNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Embedder()
        self.classify = AttentionalClassify()

    def forward(self, support_x, support_y, query_x, query_y):
        support = F.normalize(self.embed(support_x), dim=-1)
        query = self.embed(query_x)
        similarities = query @ support.t()
        preds = self.classify(similarities, F.one_hot(support_y, WAYS).float())
        accuracy = (preds.argmax(dim=1) == query_y).float().mean()
        loss = F.cross_entropy(preds, query_y)
        return loss, accuracy


basis = torch.randn(6, DIM)


def episode():
    codes = torch.randn(WAYS, 6)
    labels = torch.arange(WAYS)
    support_y, query_y = labels.repeat(SHOTS), labels.repeat(QUERIES)

    def draw(y):
        return codes[y] @ basis + 1.5 * torch.randn(len(y), DIM)

    return draw(support_y), support_y, draw(query_y), query_y


model = MatchingNetwork()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses, hits = [], []
for number in range(1, 601):
    loss, accuracy = model(*episode())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    hits.append(accuracy.item())
    if number % 150 == 0:
        print(f"episode {number}  loss {sum(losses[-100:]) / 100:.4f}  accuracy {sum(hits[-100:]) / 100:.3f}")
