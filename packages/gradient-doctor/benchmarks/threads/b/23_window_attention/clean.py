import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(22)
SEQ, DIM, CLASSES, WINDOW = 10, 32, 4, 2


class WindowEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, DIM)
        self.attn = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.out = nn.Linear(DIM, CLASSES)
        i = torch.arange(SEQ)
        dist = i.unsqueeze(1) - i.unsqueeze(0)
        self.register_buffer("window", (dist < 0) | (dist >= WINDOW))

    def forward(self, x, pad):
        h = self.inp(x)
        own = torch.eye(SEQ, dtype=torch.bool)
        full = ((self.window | pad.unsqueeze(1)) & ~own).repeat_interleave(4, dim=0)
        a, _ = self.attn(h, h, h, attn_mask=full)
        return self.out(h + a)


def get_batch(w, n=32):
    x = torch.randn(n, SEQ, 8)
    length = torch.randint(5, SEQ + 1, (n,))
    pad = torch.arange(SEQ).unsqueeze(0) >= length.unsqueeze(1)
    y = (x @ w).argmax(-1)
    return x, pad, y


def train():
    w = torch.randn(8, CLASSES)
    model = WindowEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(20):
        x, pad, y = get_batch(w)
        logits = model(x, pad)
        loss = F.cross_entropy(logits[~pad], y[~pad])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
