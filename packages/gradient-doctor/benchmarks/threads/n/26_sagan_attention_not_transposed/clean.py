import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class SelfAttention(nn.Module):
    def __init__(self, channels, key_dim=8):
        super().__init__()
        self.query_conv = nn.Conv2d(channels, key_dim, 1)
        self.key_conv = nn.Conv2d(channels, key_dim, 1)
        self.value_conv = nn.Conv2d(channels, channels, 1)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        b, c, w, h = x.shape
        proj_query = self.query_conv(x).flatten(2).permute(0, 2, 1)
        proj_key = self.key_conv(x).flatten(2)
        attention = torch.softmax(torch.bmm(proj_query, proj_key), dim=-1)
        proj_value = self.value_conv(x).flatten(2)
        out = torch.bmm(proj_value, attention.permute(0, 2, 1))
        return self.gamma * out.view(b, c, w, h) + x


class Discriminator(nn.Module):
    """Also predicts, for every cell, the value stored in the cell it points to."""

    def __init__(self, cells=25, width=32):
        super().__init__()
        self.stem = nn.Conv2d(2 * cells + 4, width, 1)
        self.attn = SelfAttention(width, key_dim=24)
        self.head = nn.Sequential(nn.Conv2d(width, 32, 1), nn.LeakyReLU(0.1), nn.Conv2d(32, 4, 1))

    def forward(self, x):
        return self.head(self.attn(self.stem(x)))


def batch(n=32, size=5):
    cells = size * size
    value = torch.randint(0, 4, (n, cells))
    pointer = torch.randint(0, 3, (n, cells))
    own = torch.eye(cells).expand(n, -1, -1)
    x = torch.cat([own, F.one_hot(pointer, cells).float(), F.one_hot(value, 4).float()], -1)
    target = value.gather(1, pointer)
    return x.transpose(1, 2).reshape(n, -1, size, size), target.view(n, size, size)


model = Discriminator()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(301):
    x, target = batch()
    logits = model(x)
    loss = F.cross_entropy(logits, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        accuracy = (logits.argmax(1) == target).float().mean()
        print(f"step {step:3d}  loss {loss.item():.3f}  accuracy {accuracy:.3f}  gamma {model.attn.gamma.item():.2f}")
