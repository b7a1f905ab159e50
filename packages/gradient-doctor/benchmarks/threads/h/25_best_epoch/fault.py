import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(24)
A, B, CLASSES = 10, 6, 3


class Fusion(nn.Module):
    """Two modalities, concatenated."""

    def __init__(self):
        super().__init__()
        self.enc_a = nn.Sequential(nn.Linear(A, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.enc_b = nn.Sequential(nn.Linear(B, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 32), nn.ReLU(),
                                  nn.Dropout(0.5), nn.Linear(32, CLASSES))

    def forward(self, a, b):
        return self.head(torch.cat([self.enc_a(a), self.enc_b(b)], dim=1))


def recordings(n):
    a, b = torch.randn(n, A), torch.randn(n, B)
    y = torch.stack([a[:, 0] + b[:, 0], a[:, 1] - b[:, 1], a[:, 2] * b[:, 2]], 1).argmax(1)
    return a, b, y


def batches(data, size):
    for i in range(0, len(data[0]), size):
        yield [t[i:i + size] for t in data]


def validate(model, data):
    model.eval()
    total, hits = 0.0, 0
    with torch.no_grad():
        for a, b, y in batches(data, 8):
            model.train()
            out = model(a, b)
            total += F.cross_entropy(out, y, reduction="sum").item()
            hits += (out.argmax(1) == y).sum().item()
    n = len(data[2])
    return total / n, hits / n


def fit(model, train, valid, epochs=30):
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    best, best_state = float("inf"), None
    for epoch in range(epochs):
        model.train()
        for a, b, y in batches(train, 50):
            loss = F.cross_entropy(model(a, b), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        v_loss, v_acc = validate(model, valid)
        if v_loss < best:
            best, best_state = v_loss, copy.deepcopy(model.state_dict())
        if epoch % 6 == 5:
            print(f"epoch {epoch} train {loss.item():.4f} valid {v_loss:.4f} acc {v_acc:.3f}")
    model.load_state_dict(best_state)
    return model


fit(Fusion(), recordings(1000), recordings(160))
