import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(10)
CONFIG = {"vocab": 32, "context": 16, "dim": 48, "batch": 32}


class CharModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embedding = nn.Embedding(cfg["vocab"], cfg["dim"])
        self.attn = nn.MultiheadAttention(cfg["dim"], 4, batch_first=True)
        self.norm = nn.LayerNorm(cfg["dim"])
        self.linear = nn.Sequential(
            nn.Linear(cfg["dim"], cfg["dim"]),
            nn.ReLU(),
            nn.Linear(cfg["dim"], cfg["vocab"]),
        )

    def forward(self, idx, targets=None):
        x = self.embedding(idx)
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        x = self.norm(x + self.attn(x, x, x, attn_mask=mask, need_weights=False)[0])
        a = self.linear(x)
        out = a
        if targets is None:
            return out
        loss = F.cross_entropy(out.view(-1, self.cfg["vocab"]), targets.view(-1))
        return out, loss


def make_text(n=4000):
    step = torch.tensor([1, 5, 11])[torch.randint(3, (n // 50, 1))]
    start = torch.randint(CONFIG["vocab"], (n // 50, 1))
    return ((start + step * torch.arange(50)) % CONFIG["vocab"]).flatten()


def get_batch(data):
    ix = torch.randint(len(data) - CONFIG["context"] - 1, (CONFIG["batch"],))
    x = torch.stack([data[i : i + CONFIG["context"]] for i in ix])
    y = torch.stack([data[i + 1 : i + CONFIG["context"] + 1] for i in ix])
    return x, y


def train():
    data = make_text()
    model = CharModel(CONFIG)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(30):
        x, y = get_batch(data)
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0 or step == 29:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
