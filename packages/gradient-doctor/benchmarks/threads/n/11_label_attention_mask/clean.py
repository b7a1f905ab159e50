import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
PAD, VOCAB, LABELS, MAX_LEN = 0, 50, 6, 14


class LabelAttention(nn.Module):
    """Every label has a query of its own over the tokens of the text."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.labels = nn.Parameter(torch.randn(LABELS, dim))
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim) for _ in range(3))

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, tokens, attention_mask):
        n = tokens.shape[0]
        q = self.split(self.q_proj(self.labels).expand(n, -1, -1))
        k, v = self.split(self.k_proj(tokens)), self.split(self.v_proj(tokens))
        mask = (attention_mask == 1).view(n, 1, 1, -1).expand(-1, self.heads, LABELS, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).reshape(n, LABELS, -1)


class TextClassifier(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.attention = LabelAttention(dim, heads=4)
        self.score = nn.Linear(dim, 1)

    def forward(self, input_ids, attention_mask):
        return self.score(self.attention(self.embed(input_ids), attention_mask)).squeeze(-1)


def make_batch(n=48):
    label = torch.randint(0, LABELS, (n,))
    length = torch.randint(5, MAX_LEN, (n,))
    ids = torch.randint(1, VOCAB - LABELS, (n, MAX_LEN))
    where = (torch.rand(n) * length).long()
    ids[torch.arange(n), where] = VOCAB - LABELS + label
    attention_mask = (torch.arange(MAX_LEN)[None] < length[:, None]).long()
    return ids.masked_fill(attention_mask == 0, PAD), attention_mask, label


model = TextClassifier()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(301):
    ids, attention_mask, label = make_batch()
    logits = model(ids, attention_mask)
    loss = F.cross_entropy(logits, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 75 == 0:
        accuracy = (logits.argmax(1) == label).float().mean()
        print(f"step {step:3d}  loss {loss.item():.3f}  accuracy {accuracy:.3f}")
