import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class TinyLM(nn.Module):
    def __init__(self, vocab=64, width=64, context=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.place = nn.Embedding(context, width)
        self.block = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        x = self.embed(tokens) + self.place(torch.arange(length))
        return self.head(self.norm(self.block(x, src_mask=mask)))


def make_text(n=128, length=17, vocab=64):
    start = torch.randint(0, vocab, (n, 1))
    stride = torch.randint(1, 4, (n, 1))
    return (start + stride * torch.arange(length)) % vocab


def train(steps=60):
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        text = make_text()
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:2d} loss {loss.item():8.3f} grad norm {norm.item():8.2f}")


train()
