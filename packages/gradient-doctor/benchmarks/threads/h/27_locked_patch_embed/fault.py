import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(26)
SIZE, PATCH, DIM = 16, 4, 32


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class VisionTower(nn.Module):
    def __init__(self, layers=2, n_class=4, grad_checkpointing=True):
        super().__init__()
        self.grad_checkpointing = grad_checkpointing
        self.patch = nn.Conv2d(1, DIM, PATCH, stride=PATCH)
        self.register_buffer("pos", 0.5 * torch.randn((SIZE // PATCH) ** 2, DIM))
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(layers))
        self.head = nn.Linear(DIM, n_class)

    def lock_stem(self):
        for p in self.patch.parameters():
            p.requires_grad_(False)

    def forward(self, img):
        x = self.patch(img).flatten(2).transpose(1, 2) + self.pos
        for block in self.blocks:
            if self.grad_checkpointing:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        return self.head(x.mean(dim=1))


def pictures(n):
    """Two bright spots; the class is the way the second lies from the first."""
    img = 0.1 * torch.randn(n, 1, SIZE, SIZE)
    y = torch.randint(0, 4, (n,))
    for i in range(n):
        r, c = torch.randint(4, 12, (2,)).tolist()
        dr, dc = [(-4, 0), (4, 0), (0, -4), (0, 4)][int(y[i])]
        img[i, 0, r, c] += 4.0
        img[i, 0, r + dr, c + dc] += 2.0
    return img, y


img, y = pictures(256)
model = VisionTower()
model.lock_stem()
params = [p for p in model.parameters() if p.requires_grad]
start = model.blocks[0].mlp[0].weight.detach().clone()
opt = torch.optim.AdamW(params, lr=2e-3)
for epoch in range(31):
    for i in range(0, 256, 64):
        loss = F.cross_entropy(model(img[i:i + 64]), y[i:i + 64])
        opt.zero_grad()
        loss.backward()
        opt.step()
    if epoch % 5 == 0:
        moved = (model.blocks[0].mlp[0].weight.detach() - start).abs().max().item()
        print(f"epoch {epoch} loss {loss.item():.4f} block 0 moved {moved:.4f}")
