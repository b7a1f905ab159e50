import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(20)
VOCAB, LEN, DIM = 12, 8, 32


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear_in = nn.Linear(dim, dim, bias=False)
        self.linear_out = nn.Linear(dim * 2, dim, bias=False)
        self.softmax = nn.Softmax(dim=0)

    def forward(self, query, context):
        b, out_len, dim = query.shape
        in_len = context.size(1)
        scores = torch.bmm(self.linear_in(query), context.transpose(1, 2))
        weights = self.softmax(scores.view(b * out_len, in_len))
        weights = weights.view(b, out_len, in_len)
        mix = torch.bmm(weights, context)
        return torch.tanh(self.linear_out(torch.cat([mix, query], dim=2))), weights


class Reverser(nn.Module):
    """Writes the input sequence backwards by looking at it through attention."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.places = nn.Parameter(torch.randn(LEN, DIM) * 0.5)
        self.steps = nn.Parameter(torch.randn(LEN, DIM) * 0.5)
        self.attention = Attention(DIM)
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, seq):
        context = self.tokens(seq) + self.places
        query = self.steps.unsqueeze(0).expand(len(seq), -1, -1)
        h, weights = self.attention(query, context)
        return self.out(h), weights


model = Reverser()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for it in range(201):
    seq = torch.randint(0, VOCAB, (64, LEN))
    goal = seq.flip(1)
    logits, weights = model(seq)
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), goal.reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 25 == 0:
        acc = (logits.argmax(-1) == goal).float().mean().item()
        print(f"{it:4d} loss {loss.item():.4f} acc {acc:.3f} weights of one query sum to {weights[0, 0].sum().item():.3f}")
