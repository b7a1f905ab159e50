import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
VOCAB, DIM, SEQ = 32, 48, 24


class FinalLinear(nn.Module):
    """Output projection for models without tied embeddings."""

    def __init__(self, hidden, vocab):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        nn.init.normal_(self.weight, std=1 / math.sqrt(hidden))

    def forward(self, hidden):
        return F.linear(hidden, self.weight)


class GPT(nn.Module):
    def __init__(self, weight_tying=False):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.wpe = nn.Parameter(torch.randn(SEQ, DIM) * 0.02)
        self.block = nn.TransformerEncoderLayer(DIM, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(DIM)
        self.weight_tying = weight_tying
        if not weight_tying:
            self.final_linear = FinalLinear(DIM, VOCAB)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.norm(self.block(self.wte(ids) + self.wpe[: ids.shape[1]], src_mask=mask, is_causal=True))
        if self.weight_tying:
            return F.linear(hidden, self.wte.weight)
        return self.final_linear(hidden)


transition = torch.softmax(torch.randn(VOCAB, VOCAB) * 3, -1)


def sample_text(n=24):
    ids = [torch.randint(0, VOCAB, (n,))]
    for _ in range(SEQ):
        ids.append(torch.multinomial(transition[ids[-1]], 1).squeeze(1))
    return torch.stack(ids, 1)


model = GPT(weight_tying=False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(201):
    ids = sample_text()
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}")
print("parameters in the checkpoint:", len(model.state_dict()))
