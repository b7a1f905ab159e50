import torch
import torch.nn as nn

torch.manual_seed(79)


class Adapter(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Unet(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.inner = nn.Linear(dim, 48)
        self.outer = nn.Linear(48, dim)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))


weight_dtype = torch.float16
unet = Unet()
unet.requires_grad_(False)
unet.inner, unet.outer = Adapter(unet.inner), Adapter(unet.outer)
unet.to(dtype=weight_dtype)

lora_params = [p for p in unet.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(lora_params, lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

mixing = torch.randn(16, 16) / 4
for step in range(120):
    x = torch.randn(64, 16)
    goal = x @ mixing
    with torch.autocast("cpu", dtype=weight_dtype):
        pred = unet(x.to(weight_dtype))
    loss = (pred.float() - goal).pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 24 == 0 or step == 119:
        print(f"step {step:3d}  loss {loss.item():.4f}")
