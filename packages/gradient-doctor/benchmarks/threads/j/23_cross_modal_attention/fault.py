import math
import torch
import torch.nn as nn
import torch.nn.functional as F


def attention(query, key, value, attn_mask):
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    weights = (scores + attn_mask).softmax(dim=-1)
    return weights @ value


class CrossModalBlock(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def split(self, x):
        b, n, d = x.shape
        return x.view(b, n, self.heads, d // self.heads).transpose(1, 2)

    def forward(self, patches, words, visible):
        mask = torch.full(visible.shape, float("-inf"))
        mask = mask.masked_fill(visible, 0.0).unsqueeze(1)
        h = self.norm(patches)
        y = attention(self.split(self.q(h)), self.split(self.k(words)), self.split(self.v(words)), mask)
        return patches + self.out(y.transpose(1, 2).flatten(2))


class Grounder(nn.Module):
    def __init__(self, dim=32, classes=5):
        super().__init__()
        self.patch = nn.Linear(6, dim)
        self.word = nn.Embedding(20, dim)
        self.block = CrossModalBlock(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, patches, words, visible):
        return self.head(self.block(self.patch(patches), self.word(words), visible))


def make_batch(n=16, patches=9, words=5):
    tokens = torch.randint(0, 20, (n, words))
    region = torch.randint(0, words + 1, (n, patches))  # words = background patch
    visible = region.unsqueeze(-1) == torch.arange(words)
    feats = torch.randn(n, patches, 6)
    padded = torch.cat([tokens % 4, torch.full((n, 1), 4)], 1)
    return feats, tokens, visible, padded.gather(1, region)


def main():
    torch.manual_seed(0)
    net = Grounder()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for it in range(151):
        feats, tokens, visible, label = make_batch()
        loss = F.cross_entropy(net(feats, tokens, visible).flatten(0, 1), label.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 30 == 0:
            print(f"it {it}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
