import torch
import torch.nn as nn
import torch.nn.functional as F


class AxisAttention(nn.Module):
    """Attention inside horizontal stripes of a feature map."""

    def __init__(self, dim, heads=2, width=1):
        super().__init__()
        self.width = width
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, src):
        b, c, h, w = src.shape
        stripes = h // self.width
        x = src.view(b, c, stripes, self.width, w)
        x = x.permute(0, 2, 3, 4, 1).reshape(b * stripes, self.width * w, c)
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        x = x + self.mlp(x)
        x = x.view(b, stripes, self.width, w, c).permute(0, 4, 1, 2, 3)
        return x.reshape(b, c, h, w)


class MattingNet(nn.Module):
    def __init__(self, dim=32, size=8):
        super().__init__()
        self.stem = nn.Conv2d(2, dim, 1)
        self.pos = nn.Parameter(0.02 * torch.randn(1, dim, size, size))
        self.block1 = AxisAttention(dim)
        self.block2 = AxisAttention(dim)
        self.head = nn.Conv2d(dim, 1, 1)

    def forward(self, x):
        x = self.stem(x) + self.pos
        return self.head(self.block2(self.block1(x)))


def make_batch(n=16, size=8):
    color = torch.randn(n, 1, size, size)
    scribble = torch.zeros(n, 1, size, size)
    row_value = (torch.rand(n, 1, size, 1) < 0.5).float()
    col = torch.randint(size, (n, 1, size, 1))
    scribble.scatter_(3, col, 2 * row_value - 1)
    alpha = torch.where(color > 0, row_value.expand_as(color), 0.5)
    return torch.cat([color, scribble], 1), alpha


def main():
    torch.manual_seed(0)
    net = MattingNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for it in range(1, 161):
        image, alpha = make_batch()
        loss = F.l1_loss(torch.sigmoid(net(image)), alpha)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 40 == 0:
            print(f"it {it}  alpha loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
