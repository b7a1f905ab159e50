import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(27)
N_USERS, N_ITEMS, DIM = 80, 50, 12


def load_vectors(vectors):
    return nn.Embedding.from_pretrained(vectors)


class BPRModel(nn.Module):
    """Matrix factorisation that starts from vectors of another system."""

    def __init__(self, user_vectors, item_vectors):
        super().__init__()
        self.user_embedding = load_vectors(user_vectors)
        self.item_embedding = load_vectors(item_vectors)

    def score(self, user, item):
        return (self.user_embedding(user) * self.item_embedding(item)).sum(dim=1)

    def calculate_loss(self, user, pos, neg):
        return -F.logsigmoid(self.score(user, pos) - self.score(user, neg)).mean()


class Interactions:
    def __init__(self):
        taste, kind = torch.randn(N_USERS, 3), torch.randn(N_ITEMS, 3)
        affinity = taste @ kind.t() + 0.3 * torch.randn(N_USERS, N_ITEMS)
        order = affinity.argsort(dim=1, descending=True)
        self.liked, self.other = order[:, :10], order[:, 10:]

    def sample(self, n):
        user = torch.randint(0, N_USERS, (n,))
        pos = self.liked[user, torch.randint(0, self.liked.size(1), (n,))]
        neg = self.other[user, torch.randint(0, self.other.size(1), (n,))]
        return user, pos, neg


class Trainer:
    def __init__(self, model, lr=0.02):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def fit(self, data, epochs=8, batches=40):
        for epoch in range(epochs):
            self.model.train()
            total = 0.0
            for _ in range(batches):
                loss = self.model.calculate_loss(*data.sample(256))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += loss.item()
            print(f"epoch {epoch}  train loss {total / batches:.4f}")


if __name__ == "__main__":
    model = BPRModel(0.1 * torch.randn(N_USERS, DIM), 0.1 * torch.randn(N_ITEMS, DIM))
    Trainer(model).fit(Interactions())
