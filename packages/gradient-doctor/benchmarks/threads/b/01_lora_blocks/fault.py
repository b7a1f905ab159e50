import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
VOCAB, DIM, SEQ, STEPS = 40, 32, 12, 20


class LoraLinear(nn.Module):
    def __init__(self, base, rank=4, alpha=16):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(SEQ, DIM) * 0.02)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        h = self.embed(ids) + self.pos[: ids.size(1)]
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return self.lm_head(self.norm(h))


def add_lora(model):
    for p in model.parameters():
        p.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up, block.down = LoraLinear(block.qkv), LoraLinear(block.up), LoraLinear(block.down)
    model.lm_head = LoraLinear(model.lm_head)


def batch(n=16):
    start = torch.randint(VOCAB, (n, 1))
    return (start + 3 * torch.arange(SEQ + 1)) % VOCAB


def train():
    model = TinyLM()
    add_lora(model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=5e-3)
    for step in range(STEPS):
        seq = batch()
        logits = model(seq[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), seq[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    norms = {n: p.norm().item() for n, p in model.named_parameters() if n.endswith("lora_B")}
    print("lora_B norms", {n: round(v, 4) for n, v in norms.items()})


if __name__ == "__main__":
    train()
