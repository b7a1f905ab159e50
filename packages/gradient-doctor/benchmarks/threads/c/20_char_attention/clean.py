import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class CausalAttention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.resid = nn.Dropout(dropout)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(c, dim=2)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.resid(self.proj(y.transpose(1, 2).reshape(b, t, c)))


class CharModel(nn.Module):
    def __init__(self, vocab=20, width=32, context=24, dropout=0.3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.place = nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, 2, dropout)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(x + self.attention(self.norm(x)))


def batch(n=48, length=25, vocab=20):
    start = torch.randint(0, vocab, (n, 3))
    text = start.repeat(1, length // 3 + 1)[:, :length]
    return text[:, :-1], text[:, 1:]


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def estimate(model, x, y):
    model.eval()
    values = [loss_of(model, x, y).item() for _ in range(3)]
    model.train()
    return values


def train(steps=150):
    model = CharModel()
    held_out = batch(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        loss = loss_of(model, *batch())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 30 == 0 or step == steps - 1:
            shown = " ".join(f"{v:.4f}" for v in estimate(model, *held_out))
            print(f"step {step:3d} train {loss.item():.4f} val, three times: {shown}")


train()
