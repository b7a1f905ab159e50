import torch
import torch.nn as nn


class DecoderOnly(nn.Module):
    """Prior over the codes of a VQ-VAE, read row by row; code 0 begins a sequence."""

    def __init__(self, num_tokens, max_len, dim=48, heads=4, layers=2):
        super().__init__()
        self.token = nn.Embedding(num_tokens, dim)
        self.position = nn.Parameter(0.02 * torch.randn(max_len, dim))
        block = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.to_logits = nn.Linear(dim, num_tokens)

    def forward(self, codes):
        n = codes.size(1)
        causal = torch.triu(torch.full((n, n), float("-inf")), 1)
        return self.to_logits(self.blocks(self.token(codes) + self.position[:n], mask=causal))

    @torch.no_grad()
    def generate(self, begin, length):
        codes = begin
        while codes.size(1) < length:
            codes = torch.cat([codes, self(codes)[:, -1:].argmax(-1)], 1)
        return codes


class Inferer:
    def __call__(self, latents, model):
        start = torch.zeros(len(latents), 1, dtype=torch.long)
        codes = torch.cat([start, latents.flatten(1)], 1)
        return model(codes), codes


def latents(n, side=4, codes=9):
    """Stripes: every next code is the one before plus a step that belongs to the image."""
    first = torch.randint(0, codes, (n, 1))
    step = torch.randint(1, 3, (n, 1))
    return ((first + step * torch.arange(side * side)) % codes + 1).view(n, side, side)


def follows_stripes(seq, codes=9):
    step = (seq[:, 2:3] - seq[:, 1:2]) % codes
    return ((seq[:, 3:] - seq[:, 2:-1]) % codes == step).float().mean().item()


torch.manual_seed(0)
model, inferer, ce_loss = DecoderOnly(10, 17), Inferer(), nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(1, 6):
    model.train()
    for _ in range(25):
        logits, target = inferer(latents(32), model)
        loss = ce_loss(logits.transpose(1, 2), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    model.eval()
    begin = torch.cat([torch.zeros(64, 1, dtype=torch.long), latents(64).flatten(1)[:, :2]], 1)
    print(f"epoch {epoch} ce {loss.item():.4f} generated codes that continue the stripes {follows_stripes(model.generate(begin, 17)):.2f}")
