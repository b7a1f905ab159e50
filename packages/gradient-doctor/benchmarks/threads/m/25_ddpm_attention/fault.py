import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class AttentionBlock(nn.Module):
    def __init__(self, channels, heads=2, d_k=16):
        super().__init__()
        self.heads, self.d_k = heads, d_k
        self.norm = nn.GroupNorm(4, channels)
        self.projection = nn.Linear(channels, heads * d_k * 3)
        self.output = nn.Linear(heads * d_k, channels)
        self.scale = d_k ** -0.5

    def forward(self, x):
        b, c, h, w = x.shape
        x = self.norm(x).view(b, c, -1).permute(0, 2, 1)
        qkv = self.projection(x).view(b, -1, self.heads, 3 * self.d_k)
        q, k, v = torch.chunk(qkv, 3, dim=-1)
        attn = torch.einsum("bihd,bjhd->bijh", q, k) * self.scale
        attn = attn.softmax(dim=1)
        res = torch.einsum("bijh,bjhd->bihd", attn, v)
        res = self.output(res.reshape(b, -1, self.heads * self.d_k)) + x
        return res.permute(0, 2, 1).reshape(b, c, h, w)


class DenoiseNet(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.inp = nn.Sequential(nn.Conv2d(4, ch, 1), nn.SiLU(), nn.Conv2d(ch, ch, 1))
        self.attn = AttentionBlock(ch)
        self.out = nn.Sequential(nn.Conv2d(ch, 32, 1), nn.SiLU(), nn.Conv2d(32, 1, 1))

    def forward(self, x, cond, t):
        t_map = t.view(-1, 1, 1, 1).expand_as(x)
        return self.out(self.attn(self.inp(torch.cat([x, cond, t_map], 1))))


def images(batch=32, size=6):
    """Flat images in the colour of one flagged pixel of a reference."""
    ref = torch.randn(batch, 1, size, size)
    pick = torch.randint(0, size * size, (batch,))
    flag = F.one_hot(pick, size * size).float().view(batch, 1, size, size)
    colour = (ref * flag).sum(dim=(2, 3), keepdim=True)
    return colour + 0.1 * torch.randn(batch, 1, size, size), torch.cat([ref, flag], 1)


net = DenoiseNet()
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
running = 0.0
for step in range(350):
    x0, cond = images()
    t = torch.rand(32)
    noise = torch.randn_like(x0)
    a = (0.2 - 0.19 * t).view(-1, 1, 1, 1)
    x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
    loss = F.mse_loss(net(x_t, cond, t), x0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running = 0.95 * running + 0.05 * loss.item() if step else loss.item()
    if step % 70 == 69:
        print(f"step {step + 1}: x0 mse {running:.4f}")
