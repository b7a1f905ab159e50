import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR

torch.manual_seed(0)
VOCAB, DIM, SEQ = 24, 48, 12


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM).requires_grad_(False)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True).requires_grad_(False)
        self.up = LoRALinear(nn.Linear(DIM, 2 * DIM))
        self.head = LoRALinear(nn.Linear(2 * DIM, VOCAB))

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.head(F.silu(self.up(h)))


def make_dataset(n):
    table = torch.randint(0, VOCAB, (VOCAB, VOCAB))
    ids = torch.randint(0, VOCAB, (n, SEQ))
    for t in range(2, SEQ):
        ids[:, t] = table[ids[:, t - 1], 0]
    return ids


def train(model, data, optimizer, lr_scheduler, num_epochs, batch_size=32):
    for epoch in range(num_epochs):
        total_loss = 0.0
        batches = data[torch.randperm(len(data))].split(batch_size)
        for ids in batches:
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
            total_loss += loss.item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
        lr = optimizer.param_groups[0]["lr"]
        print(f"epoch {epoch + 1}  train loss {total_loss / len(batches):.4f}  ppl {math.exp(total_loss / len(batches)):.2f}  lr {lr:.1e}")


model = TinyLM()
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=5e-3, weight_decay=0.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.85)
train(model, make_dataset(1024), optimizer, scheduler, num_epochs=6)
