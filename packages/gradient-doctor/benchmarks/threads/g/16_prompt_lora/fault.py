import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)


class LoRALayer(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        n_out, n_in = base.weight.shape
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.zeros(n_in, r))
        self.lora_B = nn.Parameter(torch.zeros(r, n_out))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_A @ self.lora_B)


class Tagger(nn.Module):
    def __init__(self, d=16, n_class=5):
        super().__init__()
        self.up = nn.Linear(d, 48)
        self.down = nn.Linear(48, n_class)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def fit(model, x, y, steps, lr, tag):
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    for s in range(steps):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if s % (steps // 4) == 0 or s == steps - 1:
            print(f"{tag} {s:3d}  loss {loss.item():.4f}")


x = torch.randn(400, 16)
old_task = (x @ torch.randn(16, 5)).argmax(1)
new_task = (x @ torch.randn(16, 5)).argmax(1)

model = Tagger()
fit(model, x, old_task, 100, 1e-2, "pretrain")
model.up = LoRALayer(model.up)
model.down = LoRALayer(model.down)
fit(model, x, new_task, 200, 1e-2, "adapt")
