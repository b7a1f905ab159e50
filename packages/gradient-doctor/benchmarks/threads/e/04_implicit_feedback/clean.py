import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

np.random.seed(7)
torch.manual_seed(7)


class NeuMF(nn.Module):
    def __init__(self, users, items, factors=8):
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.user_mlp, self.item_mlp = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.mlp = nn.Sequential(nn.Linear(2 * factors, factors), nn.ReLU())
        self.predict = nn.Linear(2 * factors, 1)
        for m in self.modules():
            if isinstance(m, nn.Embedding):
                nn.init.normal_(m.weight, std=0.1)

    def forward(self, user, item):
        gmf = self.user_gmf(user) * self.item_gmf(item)
        mlp = self.mlp(torch.cat((self.user_mlp(user), self.item_mlp(item)), dim=-1))
        score = self.predict(torch.cat((gmf, mlp), dim=-1))
        return score.view(-1)


class PointRecommender:
    def __init__(self, model, lr=0.01, epochs=8):
        self.model, self.epochs = model, epochs
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.criterion = nn.BCEWithLogitsLoss(reduction="mean")

    def fit(self, loader):
        for epoch in range(1, self.epochs + 1):
            seen, total = 0, 0.0
            for user, item, label in loader:
                self.model.zero_grad()
                loss = self.criterion(self.model(user, item), label)
                loss.backward()
                self.optimizer.step()
                total += loss.item() * len(label)
                seen += len(label)
            print(f"[epoch {epoch:02d}] loss {total / seen:.4f}")
        return self


def interactions(users=60, items=80, negatives=4):
    taste_u, taste_i = np.random.randn(users, 3), np.random.randn(items, 3)
    liked = taste_u @ taste_i.T
    rows = []
    for u in range(users):
        order = np.argsort(-liked[u])
        best, rest = order[:16], order[16:]
        rows += [(u, i, 1.0) for i in best]
        rows += [(u, i, 0.0) for i in np.random.choice(rest, 16 * negatives, replace=False)]
    rows = np.array(rows)
    return (torch.from_numpy(rows[:, 0]).long(), torch.from_numpy(rows[:, 1]).long(),
            torch.from_numpy(rows[:, 2]).float())


data = TensorDataset(*interactions())
PointRecommender(NeuMF(60, 80)).fit(DataLoader(data, batch_size=128, shuffle=True))
