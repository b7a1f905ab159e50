"""A plain loop: one trunk, a regression and a classification head, padded rows masked out."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, ROWS, FEATURES, HIDDEN, CLASSES = 4, 12, 6, 16, 3


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Dropout(0.1), nn.Linear(HIDDEN, HIDDEN)
        )
        self.norm = nn.LayerNorm(HIDDEN)
        self.value = nn.Linear(HIDDEN, 1)
        self.label = nn.Linear(HIDDEN, CLASSES)

    def features(self, x):
        return torch.tanh(self.norm(self.trunk(x)))

    def forward(self, x):
        h = self.features(x)
        value = self.value(h).squeeze(-1)
        logits = self.label(h)
        return value, logits


def make_batch(generator):
    rows = torch.arange(ROWS)
    length = ROWS - int(torch.randint(1, 5, (1,), generator=generator))
    real = rows < length
    x = torch.randn(ROWS, FEATURES, generator=generator)
    x = torch.where(real[:, None], x, torch.zeros(()))
    target = torch.where(real, x.sum(-1).sin(), torch.zeros(()))
    label = torch.where(real, x[:, :CLASSES].argmax(-1), torch.zeros((), dtype=torch.long))
    return {"x": x, "target": target, "label": label, "real": real}


def masked_mean(values, real):
    kept = torch.where(real, values, torch.zeros(()))
    return kept.sum() / real.sum()


def loss_of(model, batch):
    value, logits = model(batch["x"])
    real = batch["real"]
    squared = F.mse_loss(value, batch["target"], reduction="none")
    regression = masked_mean(squared, real)
    cross = F.cross_entropy(logits, batch["label"], reduction="none")
    classification = masked_mean(cross, real)
    return regression + 0.5 * classification


@torch.no_grad()
def accuracy(model, batch):
    model.eval()
    _, logits = model(batch["x"])
    right = (logits.argmax(-1) == batch["label"])[batch["real"]]
    model.train()
    return right.float().mean().item()


def build():
    torch.manual_seed(0)
    model = TwoHeads()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=STEPS)
    return model, optimizer, scheduler


def main():
    model, optimizer, scheduler = build()
    generator = torch.Generator().manual_seed(1)
    running = 0.0
    for step in range(STEPS):
        batch = make_batch(generator)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        running = 0.9 * running + 0.1 * loss.item()
        print(f"step {step} loss {running:.3f} accuracy {accuracy(model, batch):.2f}")


if __name__ == "__main__":
    main()
