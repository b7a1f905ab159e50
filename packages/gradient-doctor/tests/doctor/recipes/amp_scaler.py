"""Mixed precision: fp32 weights, fp16 autocast, a GradScaler, and two micro-batches per step."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, MICRO, ROWS, CHANNELS, WIDTH, CLASSES = 4, 2, 8, 4, 12, 5
DEVICE = "cpu"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH), Block(WIDTH)])
        self.gate = nn.Linear(WIDTH, 1, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, signal):
        x = self.embed(signal)
        for block in self.blocks:
            x = block(x)
        weight = torch.softmax(self.gate(x), dim=1)
        pooled = (weight * x).sum(1)
        return self.head(pooled)


def make_batch(generator):
    signal = torch.randn(ROWS, 7, CHANNELS, generator=generator)
    label = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    soft = F.one_hot(label, CLASSES).float() * 0.9 + 0.1 / CLASSES
    return signal, label, soft


def loss_of(model, signal, label, soft):
    with torch.autocast(DEVICE, dtype=torch.float16):
        logits = model(signal)
        hard = F.cross_entropy(logits.float(), label)
    log_law = F.log_softmax(logits.float(), dim=-1)
    smooth = F.kl_div(log_law, soft, reduction="batchmean")
    loss = 0.7 * hard + 0.3 * smooth
    return loss / MICRO


def build():
    torch.manual_seed(0)
    model = Classifier().to(DEVICE)
    model.train()
    groups = [{"params": model.blocks.parameters(), "weight_decay": 0.01}]
    rest = [model.embed, model.gate, model.head]
    groups += [{"params": [p for part in rest for p in part.parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    return model, optimizer, scaler


def main():
    model, optimizer, scaler = build()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(MICRO):
            signal, label, soft = make_batch(generator)
            loss = loss_of(model, signal, label, soft)
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step} loss {total:.3f} norm {norm:.3f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
