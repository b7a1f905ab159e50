import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(83)


class Block(nn.Module):
    """Frozen feed-forward block with a small trainable bottleneck."""

    def __init__(self, d, bottleneck=8):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.adapter = nn.Sequential(nn.Linear(d, bottleneck), nn.GELU(), nn.Linear(bottleneck, d))

    def forward(self, x):
        x = x + self.ff(self.norm(x))
        return x + self.adapter(x)


class TinyLM(nn.Module):
    def __init__(self, vocab=20, d=32, depth=3, gradient_checkpointing=True):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.lm_head = nn.Linear(d, vocab)
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, ids):
        x = self.embed(ids).requires_grad_(True)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        return self.lm_head(x)


model = TinyLM()
model.requires_grad_(False)
for block in model.blocks:
    block.adapter.requires_grad_(True)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

follows = torch.randperm(20)
model.train()
for step in range(150):
    ids = torch.randint(0, 20, (32, 6))
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), follows[ids].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0 or step == 149:
        print(f"step {step:3d}  loss {loss.item():.4f}")
