import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
BOS, EOS, N_WORDS, N_PREFIX = 0, 1, 14, 2


def tokenize_and_mask(caption):
    ids = F.pad(caption, (1, 0), value=BOS)
    ids = F.pad(ids, (0, 1), value=EOS)
    labels = ids.clone()
    labels[:, 0] = labels[:, 0].masked_fill(labels[:, 0] == BOS, -100)
    return ids, labels


class JointDecoder(nn.Module):
    """Image tokens in front, text behind, causal attention over all of them."""

    def __init__(self, dim=48, longest=8):
        super().__init__()
        self.adapter = nn.Linear(12, N_PREFIX * dim)
        self.embed = nn.Embedding(N_WORDS, dim)
        self.pos = nn.Parameter(0.1 * torch.randn(longest, dim))
        self.block = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(dim, N_WORDS)
        self.output_slice = slice(N_PREFIX, None)

    def forward(self, image, ids):
        prefix = self.adapter(image).view(len(image), N_PREFIX, -1)
        x = torch.cat([prefix, self.embed(ids)], 1)
        x = x + self.pos[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.lm_head(self.block(x, src_mask=mask, is_causal=True))[:, self.output_slice]

    @torch.no_grad()
    def generate(self, image, steps=3):
        ids = torch.full((len(image), 1), BOS)
        for _ in range(steps):
            ids = torch.cat([ids, self(image, ids)[:, -1:].argmax(-1)], 1)
        return ids[:, 1:]


MEANING = torch.randn(3, 12, 4)


def image_and_caption(n):
    attributes = torch.randint(0, 4, (n, 3))
    image = sum(MEANING[i][:, attributes[:, i]].t() for i in range(3)) + 0.1 * torch.randn(n, 12)
    return image, attributes + torch.tensor([2, 6, 10])


def main():
    model = JointDecoder()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, 301):
        image, caption = image_and_caption(64)
        ids, labels = tokenize_and_mask(caption)
        logits = model(image, ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 60 == 0:
            image, caption = image_and_caption(200)
            right = (model.generate(image) == caption).float().mean()
            print(f"step {step} loss {loss.item():.4f} grad_norm {grad_norm:.3f} generated words right {right:.3f}")


main()
