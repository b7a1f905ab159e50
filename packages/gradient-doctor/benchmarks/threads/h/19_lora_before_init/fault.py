import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(18)
DIM = 24


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scaling * self.lora_B(self.lora_A(x))


class Predictor(nn.Module):
    """Maps one latent frame to the next one."""

    def __init__(self):
        super().__init__()
        self.proj_in = nn.Linear(DIM, DIM)
        self.proj_mid = nn.Linear(DIM, DIM)
        self.proj_out = nn.Linear(DIM, DIM)

    def init_weights(self):
        for name, m in self.named_modules():
            if not isinstance(m, nn.Linear):
                continue
            if name.startswith("proj") and "lora" not in name:
                nn.init.xavier_uniform_(m.weight)
                nn.init.zeros_(m.bias)
            else:
                nn.init.zeros_(m.weight)

    def add_lora(self):
        for name in ("proj_in", "proj_mid", "proj_out"):
            setattr(self, name, LoRALinear(getattr(self, name)))

    def forward(self, x):
        h = F.silu(self.proj_in(x))
        h = h + F.silu(self.proj_mid(h))
        return self.proj_out(h)


def build_model(use_lora=True):
    model = Predictor()
    if use_lora:
        model.add_lora()
    model.init_weights()
    return model


model = build_model()
params = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0)
turn = torch.linalg.qr(torch.randn(DIM, DIM))[0]
frames = torch.randn(512, DIM)
target = torch.tanh(frames @ turn)
for it in range(301):
    idx = torch.randint(0, 512, (64,))
    loss = F.mse_loss(model(frames[idx]), target[idx])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 60 == 0:
        size = sum(p.detach().abs().sum() for p in params).item()
        print(f"iter {it} loss {loss.item():.4f} |lora| {size:.3f}")
