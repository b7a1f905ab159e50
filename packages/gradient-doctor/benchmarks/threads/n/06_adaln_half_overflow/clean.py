import torch
import torch.nn as nn

torch.manual_seed(0)
DIM, TEXT, VIDEO = 24, 4, 10


class LoraLinear(nn.Module):
    def __init__(self, inner, rank=4):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, inner.in_features) / rank)
        self.lora_B = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x):
        return self.inner(x) + x @ self.lora_A.T @ self.lora_B.T


class LastBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (LoraLinear(nn.Linear(DIM, DIM)) for _ in range(3))
        self.adaln = nn.Linear(DIM, DIM).requires_grad_(False)
        self.final = nn.Linear(DIM, DIM).requires_grad_(False)
        self.compute_dtype = torch.float16

    def forward(self, tokens, conditioning):
        weights = (self.q(tokens) @ self.k(tokens).transpose(1, 2) / DIM ** 0.5).softmax(-1)
        hidden = tokens + weights @ self.v(tokens)
        scale = self.adaln(conditioning).clamp(-3e4, 3e4).to(self.compute_dtype)
        hidden = hidden.to(self.compute_dtype) * (1 + scale)
        return self.final(hidden[:, TEXT:].float())


def make_batch(n=16):
    tokens = torch.randn(n, TEXT + VIDEO, DIM)
    level = torch.rand(n, 1, 1)
    conditioning = level.expand(n, TEXT + VIDEO, DIM).clone()
    conditioning[:, :TEXT] *= 4e5
    target = tokens[:, TEXT:] + tokens[:, :TEXT].mean(1, keepdim=True)
    return tokens, conditioning, target


model = LastBlock()
adapters = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=5e-3)
for step in range(201):
    tokens, conditioning, target = make_batch()
    loss = (model(tokens, conditioning) - target).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(adapters, 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}  |lora_B| {model.v.lora_B.norm().item():.4f}")
