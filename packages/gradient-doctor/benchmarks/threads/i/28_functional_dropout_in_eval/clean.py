import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(28)
FIELDS, VALUES = 6, 10


class AttentionalFM(nn.Module):
    def __init__(self, dim=12, attn=12, dropouts=(0.3, 0.3)):
        super().__init__()
        self.linear = nn.Embedding(FIELDS * VALUES, 1)
        self.bias = nn.Parameter(torch.zeros(1))
        self.embedding = nn.Embedding(FIELDS * VALUES, dim)
        self.attention = nn.Linear(dim, attn)
        self.projection = nn.Linear(attn, 1, bias=False)
        self.fc = nn.Linear(dim, 1, bias=False)
        self.dropouts = dropouts
        self.register_buffer("offsets", torch.arange(FIELDS) * VALUES)
        pairs = torch.combinations(torch.arange(FIELDS), 2)
        self.register_buffer("row", pairs[:, 0])
        self.register_buffer("col", pairs[:, 1])

    def forward(self, x):
        x = x + self.offsets
        e = self.embedding(x)
        inner = e[:, self.row] * e[:, self.col]
        scores = F.softmax(self.projection(F.relu(self.attention(inner))), dim=1)
        scores = F.dropout(scores, p=self.dropouts[0], training=self.training)
        pooled = F.dropout((scores * inner).sum(dim=1), p=self.dropouts[1], training=self.training)
        return (self.linear(x).sum(dim=1) + self.bias + self.fc(pooled)).squeeze(1)


def impressions(n, effect):
    x = torch.randint(0, VALUES, (n, FIELDS))
    logit = 3.0 * effect[x[:, 0], x[:, 1]] + effect[x[:, 2], x[:, 3]]
    return x, (logit + 0.5 * torch.randn(n) > 0).float()


def train_epoch(model, optimizer, x, y):
    model.train()
    for index in torch.randperm(len(x)).split(128):
        loss = F.binary_cross_entropy_with_logits(model(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    logits = model(x)
    return F.binary_cross_entropy_with_logits(logits, y).item(), logits


effect = torch.randn(VALUES, VALUES).sign()
x_train, y_train = impressions(3000, effect)
x_test, y_test = impressions(500, effect)
model = AttentionalFM()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(8):
    loss = train_epoch(model, optimizer, x_train, y_train)
    test_loss, first = evaluate(model, x_test, y_test)
    _, second = evaluate(model, x_test, y_test)
    gap = (first - second).abs().mean().item()
    print(f"epoch {epoch}  train {loss:.4f}  test {test_loss:.4f}  two evaluations differ by {gap:.4f}")
