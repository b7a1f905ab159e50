import math
import torch
import torch.nn as nn
import torch.nn.functional as F

CODES, LENGTH, IGNORE = 16, 16, -1


class Transformer(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.token_emb = nn.Embedding(CODES + 1, dim)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(LENGTH, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.to_logits = nn.Linear(dim, CODES)

    def forward(self, x):
        return self.to_logits(self.blocks(self.token_emb(x) + self.pos_emb))


class MaskGit(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = Transformer()
        self.mask_id = CODES

    def forward(self, ids):
        batch, seq_len = ids.shape
        rand_time = torch.rand(batch)
        num_masked = (torch.cos(rand_time * math.pi / 2) * seq_len).round().clamp(min=1)
        order = torch.rand(batch, seq_len).argsort(dim=-1)
        mask = order < num_masked.unsqueeze(-1)

        labels = torch.where(mask, ids, IGNORE)
        x = torch.where(mask, self.mask_id, ids)
        logits = self.transformer(x)
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE)

    @torch.no_grad()
    def fill(self, ids, mask):
        x = torch.where(mask, self.mask_id, ids)
        return self.transformer(x).argmax(-1)


def sample_codes(n):
    start = torch.randint(0, CODES, (n, 1))
    stride = torch.randint(1, 4, (n, 1))
    return (start + stride * torch.arange(LENGTH)) % CODES


def main():
    torch.manual_seed(0)
    model = MaskGit()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    test = sample_codes(256)
    hole = torch.zeros_like(test, dtype=torch.bool)
    hole[:, 6:9] = True
    for it in range(1, 161):
        loss = model(sample_codes(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 40 == 0:
            acc = (model.fill(test, hole) == test)[hole].float().mean().item()
            print(f"it {it}  loss {loss.item():.4f}  infilling accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
