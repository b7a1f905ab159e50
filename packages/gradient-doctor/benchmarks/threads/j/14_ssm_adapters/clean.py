import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features ** 0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.scaling * F.linear(F.linear(x, self.lora_A), self.lora_B)


def scan_inner(xz, decay, out_weight):
    """Gated linear recurrence followed by the output projection, in one call."""
    x, z = xz.chunk(2, dim=-1)
    a = torch.sigmoid(decay)
    state, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.size(1)):
        state = a * state + (1 - a) * x[:, t]
        ys.append(state)
    y = torch.stack(ys, 1) * F.silu(z)
    return F.linear(y, out_weight)


class Mixer(nn.Module):
    def __init__(self, dim, use_fast_path=False):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.in_proj = nn.Linear(dim, 4 * dim, bias=False)
        self.decay = nn.Parameter(torch.linspace(-1, 2, 2 * dim))
        self.out_proj = nn.Linear(2 * dim, dim, bias=False)
        self.use_fast_path = use_fast_path

    def forward(self, h):
        xz = self.in_proj(self.norm(h))
        if self.use_fast_path:
            return h + scan_inner(xz, self.decay, self.out_proj.weight)
        eye = torch.eye(self.decay.numel())
        return h + self.out_proj(scan_inner(xz, self.decay, eye))


class SSM(nn.Module):
    def __init__(self, vocab=20, dim=24, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Mixer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        h = self.emb(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


torch.manual_seed(0)
model = SSM().requires_grad_(False)
for layer in model.layers:
    for name in ("in_proj", "out_proj"):
        setattr(layer, name, LoRALinear(getattr(layer, name)))
trainable = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.AdamW(trainable, lr=1e-2)
for step in range(1, 121):
    tokens = torch.randint(0, 20, (16, 12))
    loss = F.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 30 == 0:
        print(f"step {step}  loss {loss.item():.4f}")
