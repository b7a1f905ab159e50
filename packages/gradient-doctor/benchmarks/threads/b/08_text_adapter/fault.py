import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(7)
VOCAB, DIM, LABELS = 60, 32, 3


class Adapter(nn.Module):
    def __init__(self, dim, bottleneck=8):
        super().__init__()
        self.down = nn.Linear(dim, bottleneck)
        self.up = nn.Linear(bottleneck, dim)

    def forward(self, x):
        return x + self.up(torch.relu(self.down(x)))


class EncoderModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(DIM, LABELS)
        self.adapters = nn.ModuleDict()

    def add_adapter(self, name):
        self.adapters[name] = Adapter(DIM)

    def train_adapter(self, name):
        for p in self.parameters():
            p.requires_grad_(False)
        for p in self.adapters[name].parameters():
            p.requires_grad_(True)

    def forward(self, ids):
        h = self.encoder(self.embed(ids))
        for adapter in self.adapters.values():
            h = adapter(h)
        return self.classifier(h.mean(1))


def get_batch(n=32):
    label = torch.randint(LABELS, (n,))
    ids = torch.randint(VOCAB // LABELS, (n, 10)) + (label * (VOCAB // LABELS)).unsqueeze(1)
    return ids, label


def main():
    model = EncoderModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.add_adapter("task")
    model.train_adapter("task")

    model.train()
    for step in range(25):
        ids, label = get_batch()
        loss = F.cross_entropy(model(ids), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
