import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class LoRAModule(nn.Module):
    def __init__(self, org, rank=4):
        super().__init__()
        self.org = org
        self.lora_down = nn.Linear(org.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, org.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x):
        return self.org(x) + self.lora_up(self.lora_down(x))


class EncoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn_in = nn.Linear(dim, 3 * dim)
        self.attn_out = nn.Linear(dim, dim)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        q, k, v = self.attn_in(self.n1(x)).chunk(3, -1)
        x = x + self.attn_out(F.scaled_dot_product_attention(q, k, v))
        return x + self.mlp(self.n2(x))


class TextEncoder(nn.Module):
    def __init__(self, vocab=50, dim=32, depth=3):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim) for _ in range(depth))
        self.proj = nn.Linear(dim, dim)
        self.gradient_checkpointing = False

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.proj(x.mean(1))


def apply_lora(encoder):
    encoder.requires_grad_(False)
    for layer in encoder.layers:
        layer.attn_in, layer.attn_out = LoRAModule(layer.attn_in), LoRAModule(layer.attn_out)
    encoder.proj = LoRAModule(encoder.proj)
    return [p for p in encoder.parameters() if p.requires_grad]


torch.manual_seed(0)
encoder = TextEncoder()
params = apply_lora(encoder)
encoder.gradient_checkpointing = True
encoder.train()
optimizer = torch.optim.AdamW(params, lr=5e-3)
ids = torch.randint(0, 50, (32, 8))
target = torch.randn(32, 32)
for step in range(1, 101):
    loss = F.mse_loss(encoder(ids), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        ups = [m.lora_up.weight.abs().sum().item() for m in encoder.modules() if isinstance(m, LoRAModule)]
        print(f"step {step}  loss {loss.item():.4f}  lora_up", " ".join(f"{u:.2f}" for u in ups))
