import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(24)
WORDS, PIXELS, DIM = 8, 25, 32


class GatedFusion(nn.Module):
    """Adds gated language features to the visual features."""

    def __init__(self, dim):
        super().__init__()
        self.word_proj = nn.Linear(dim, dim)
        self.image_proj = nn.Linear(dim, dim)
        self.res_gate = nn.Sequential(nn.Linear(dim, dim, bias=False), nn.ReLU(), nn.Linear(dim, dim, bias=False), nn.Tanh())
        # start from the purely visual features
        nn.init.zeros_(self.res_gate[0].weight)
        nn.init.zeros_(self.res_gate[2].weight)

    def forward(self, x, word):
        residual = torch.relu(self.image_proj(x)) * self.word_proj(word).unsqueeze(1)
        return x + self.res_gate(residual) * residual


class ReferringSegmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.visual = nn.Sequential(nn.Linear(WORDS, DIM), nn.ReLU())
        self.fusion = GatedFusion(DIM)
        self.mask_head = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 1))

    def forward(self, image, word):
        x = self.fusion(self.visual(image), self.words(word))
        return self.mask_head(x).squeeze(-1)


def scene(n):
    """Each pixel shows one of the object kinds; the word names the kind to mark."""
    kinds = torch.randint(0, WORDS, (n, PIXELS))
    word = torch.randint(0, WORDS, (n,))
    image = F.one_hot(kinds, WORDS).float() + 0.1 * torch.randn(n, PIXELS, WORDS)
    return image, word, (kinds == word.unsqueeze(1)).float()


model = ReferringSegmenter()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
for step in range(121):
    image, word, mask = scene(64)
    logits = model(image, word)
    loss = F.binary_cross_entropy_with_logits(logits, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        marked = (logits > 0).float()
        iou = (marked * mask).sum() / (marked + mask).clamp(max=1).sum()
        gate = model.fusion.res_gate[2].weight.abs().mean().item()
        print(f"step {step:3d}  bce {loss.item():.4f}  iou {iou.item():.3f}  gate weight {gate:.4f}")
