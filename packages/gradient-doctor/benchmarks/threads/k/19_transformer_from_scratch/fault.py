import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
VOCAB, SEQ, DIM, HEADS = 16, 12, 32, 4


class MultiHeadAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv_dim = heads, dim // heads
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def scaled_dot_product(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.qkv_dim)
        return torch.softmax(scores, dim=-1) @ v

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv_proj(x).reshape(batch, length, self.heads, 3 * self.qkv_dim)
        qkv = qkv.permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        values = self.scaled_dot_product(q, k, v)
        values = values.reshape(batch, length, self.heads * self.qkv_dim)
        return self.o_proj(values)


class EncoderBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = MultiHeadAttention(DIM, HEADS)
        self.ff = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, DIM))
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x):
        x = self.norm_1(x + self.attention(x))
        return self.norm_2(x + self.ff(x))


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.position = nn.Embedding(SEQ, DIM)
        self.blocks = nn.Sequential(EncoderBlock(), EncoderBlock())
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.size(1)))
        return self.out(self.blocks(x))


model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(1, 301):
    source = torch.randint(0, VOCAB, (32, SEQ))
    target = source.gather(1, source % SEQ)
    logits = model(source)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        accuracy = (logits.argmax(-1) == target).float().mean().item()
        print(f"step {step}  loss {loss.item():.4f}  token accuracy {accuracy:.3f}")
