import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)


class SmallViT(nn.Module):
    def __init__(self, dim=24, patch=8, size=16):
        super().__init__()
        self.patch = patch
        self.to_patch = nn.Linear(patch * patch, dim)
        self.pos = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, dim))
        self.transformer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True)
        self.mlp_head = nn.Linear(dim, 10)

    def forward(self, img):
        p = self.patch
        patches = img.unfold(1, p, p).unfold(2, p, p).flatten(3).flatten(1, 2)
        return self.mlp_head(self.transformer(self.to_patch(patches) + self.pos).mean(1))


class Extractor(nn.Module):
    """Gives the tokens before the head, whatever the vision transformer."""

    def __init__(self, vit):
        super().__init__()
        self.vit = vit
        self.latents = None
        vit.transformer.register_forward_hook(self._hook)

    def _hook(self, _, __, output):
        self.latents = output.clone()

    def forward(self, img):
        self.vit(img)
        return self.latents


class CoCa(nn.Module):
    def __init__(self, img_encoder, dim=24, words=40):
        super().__init__()
        self.img_encoder = img_encoder
        self.query = nn.Parameter(torch.randn(1, 1, dim))
        self.img_pool = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.words = nn.Embedding(words, dim)
        self.text = nn.GRU(dim, dim, batch_first=True)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, text, img):
        tokens = self.img_encoder(img)
        image, _ = self.img_pool(self.query.expand(len(img), -1, -1), tokens, tokens)
        _, sentence = self.text(self.words(text))
        image, sentence = F.normalize(image.squeeze(1), dim=-1), F.normalize(sentence[-1], dim=-1)
        sim = self.temperature.exp() * sentence @ image.t()
        target = torch.arange(len(sim))
        return (F.cross_entropy(sim, target) + F.cross_entropy(sim.t(), target)) / 2


STYLE = 1.0 * torch.randn(40, 16, 16)


def pairs(n=32):
    text = torch.randint(0, 40, (n, 2))
    contrast = torch.randint(0, 2, (n, 1, 1)) * 2 - 1
    return text, contrast * STYLE[text].sum(1) + 0.4 * torch.randn(n, 16, 16)


coca = CoCa(Extractor(SmallViT()))
optim = torch.optim.Adam(coca.parameters(), lr=3e-3)
for step in range(321):
    loss = coca(*pairs())
    loss.backward()
    optim.step()
    optim.zero_grad()
    if step % 80 == 0:
        print(f"step {step} contrastive loss {loss.item():.3f}")
