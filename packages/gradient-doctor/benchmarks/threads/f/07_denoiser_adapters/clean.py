import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class ResBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.norm = nn.GroupNorm(4, ch)
        self.conv = nn.Conv2d(ch, ch, 3, padding=1)
        self.time = nn.Linear(1, ch)
        self.adapter_in = nn.Conv2d(ch, 8, 1)
        self.adapter_out = nn.Conv2d(8, ch, 1)
        nn.init.zeros_(self.adapter_out.weight)

    def forward(self, h, t):
        r = self.conv(F.silu(self.norm(h) + self.time(t)[:, :, None, None]))
        return h + r + self.adapter_out(F.silu(self.adapter_in(h)))


class Denoiser(nn.Module):
    def __init__(self, ch=16, blocks=3, gradient_checkpointing=False):
        super().__init__()
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        self.blocks = nn.ModuleList(ResBlock(ch) for _ in range(blocks))
        self.conv_out = nn.Conv2d(ch, 3, 3, padding=1)
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, x, t):
        h = self.conv_in(x)
        for block in self.blocks:
            if self.gradient_checkpointing:
                h = checkpoint(block, h, t, use_reentrant=False)
            else:
                h = block(h, t)
        return self.conv_out(h)


def trainable(model):
    """Only the adapters and the bias of the last layer are tuned."""
    for name, p in model.named_parameters():
        p.requires_grad_("adapter" in name or name == "conv_out.bias")
    return [p for p in model.parameters() if p.requires_grad]


model = Denoiser(gradient_checkpointing=True)
params = trainable(model)
optimizer = torch.optim.AdamW(params, lr=2e-3)
running = 0.0
for step in range(1, 161):
    c = torch.rand(8, 3, 1, 1)
    ramp = torch.linspace(-1, 1, 8)
    image = c * ramp[:, None] + (1 - c) * ramp[None, :]
    t = torch.rand(8, 1)
    eps = torch.randn_like(image)
    mix = t[:, :, None, None]
    loss = F.mse_loss(model((1 - mix) * image + mix * eps, t), eps)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    running += loss.item() / 40
    if step % 40 == 0:
        print(f"step {step} noise mse {running:.4f} ({len(params)} tensors tuned)")
        running = 0.0
