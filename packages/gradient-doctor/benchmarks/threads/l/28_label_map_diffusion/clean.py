import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
K, H, W = 5, 8, 12


class SegmentationNet(nn.Module):
    def __init__(self, num_classes=K, dim=8, hidden=32):
        super().__init__()
        self.dim = dim
        self.embedding = nn.Embedding(num_classes, dim)
        self.time = nn.Linear(1, hidden)
        self.conv1 = nn.Conv2d(dim, hidden, 3, padding=1)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, padding=1)
        self.out = nn.Conv2d(hidden, num_classes, 1)

    def forward(self, t, x):
        b, c, h, w = x.size()
        x = self.embedding(x)
        x = x.permute(0, 1, 4, 2, 3)
        x = x.reshape(b, c * self.dim, h, w)
        y = F.relu(self.conv1(x) + self.time(t)[:, :, None, None])
        y = F.relu(self.conv2(y))
        return self.out(y)


def scenes(n):
    x = torch.zeros(n, 1, H, W, dtype=torch.long)
    for i in range(n):
        for k in range(1, 4):
            top, left = torch.randint(0, H - 3, (1,)).item(), torch.randint(0, W - 4, (1,)).item()
            x[i, 0, top:top + 3, left:left + 4] = k
    x[:, :, -1] = 4
    return x


def q_sample(x, t):
    keep = torch.rand(x.shape) < (1 - t)[:, None, None]
    return torch.where(keep, x, torch.randint(0, K, x.shape))


def train(net, steps=200, lr=3e-3):
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    pool = scenes(256)
    for step in range(1, steps + 1):
        x = pool[torch.randint(0, len(pool), (16,))]
        t = 0.6 * torch.rand(16, 1)
        x_t = q_sample(x, t)
        logits = net(t, x_t)
        loss = F.cross_entropy(logits, x[:, 0])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 40 == 0:
            acc = (logits.argmax(1) == x[:, 0]).float().mean().item()
            copy = (x_t == x).float().mean().item()
            print(f"step {step}  loss {loss.item():.4f}  pixel accuracy {acc:.3f}  (of the noisy map {copy:.3f})")


train(SegmentationNet())
