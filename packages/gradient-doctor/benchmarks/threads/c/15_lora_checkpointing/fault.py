import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class LoraLinear(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.fc = LoraLinear(nn.Linear(width, width))

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class Denoiser(nn.Module):
    def __init__(self, n_in=6, width=24, depth=3):
        super().__init__()
        self.gradient_checkpointing = False
        self.conv_in = nn.Linear(n_in, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.conv_out = nn.Linear(width, n_in)

    def forward(self, x):
        h = self.conv_in(x)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                h = checkpoint(block, h, use_reentrant=True)
            else:
                h = block(h)
        return self.conv_out(h)


def train(steps=250):
    model = Denoiser()
    model.gradient_checkpointing = True
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    for step in range(steps):
        noisy = torch.randn(128, 6)
        clean = torch.sin(2 * noisy) * noisy.roll(1, 1)
        loss = nn.functional.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            up = sum(b.fc.up.weight.abs().sum().item() for b in model.blocks)
            print(f"step {step:3d} loss {loss.item():.4f} lora up {up:.3f}")


train()
