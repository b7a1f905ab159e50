import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(10)


class Mlp(nn.Module):
    def __init__(self, in_features, layer_sizes):
        super().__init__()
        self._layers = []
        size = in_features
        for width in layer_sizes:
            self._layers.append(nn.Linear(size, width))
            size = width
        self.out_features = size

    def forward(self, x):
        for layer in self._layers:
            x = torch.relu(layer(x))
        return x


class RankingModel(nn.Module):
    """User and item ids plus dense features -> engagement logit."""

    def __init__(self, n_users, n_items, n_dense, dim=8):
        super().__init__()
        self.users = nn.Embedding(n_users, dim)
        self.items = nn.Embedding(n_items, dim)
        self.mlp = Mlp(2 * dim + n_dense, [32, 16])
        self.logit = nn.Linear(self.mlp.out_features, 1)

    def forward(self, user, item, dense):
        x = torch.cat([self.users(user), self.items(item), dense], dim=1)
        return self.logit(self.mlp(x)).squeeze(1)


class Events:
    def __init__(self, n_users=60, n_items=40, n_dense=6):
        self.u, self.i = torch.randn(n_users, 4), torch.randn(n_items, 4)
        self.n_dense = n_dense

    def sample(self, n):
        user = torch.randint(0, len(self.u), (n,))
        item = torch.randint(0, len(self.i), (n,))
        dense = torch.randn(n, self.n_dense)
        score = (self.u[user] * self.i[item]).sum(1) + 2.0 * dense[:, 0] * dense[:, 1]
        return user, item, dense, (score > 0).float()


events = Events()
model = RankingModel(60, 40, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
first = model.mlp._layers[0].weight.detach().clone()

for step in range(600):
    user, item, dense, clicked = events.sample(256)
    loss = F.binary_cross_entropy_with_logits(model(user, item, dense), clicked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0 or step == 599:
        moved = (model.mlp._layers[0].weight.detach() - first).abs().max().item()
        print(f"step {step:4d}  bce {loss.item():.4f}  first mlp layer moved {moved:.4f}")
