import torch
import torch.nn as nn

torch.manual_seed(14)
VOCAB, PAD, WIDTH = 40, 0, 48


class TokenDiscriminator(nn.Module):
    """Says for every token whether it was replaced, given the sentence vector."""

    def __init__(self, dim=32):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, 2)

    def forward(self, ids):
        h, _ = self.rnn(self.tokens(ids))
        return self.head(h)


def sentences(n):
    """Counting sentences (each token is the previous one plus 1), few words, much padding."""
    lengths = torch.randint(4, 9, (n, 1))
    position = torch.arange(WIDTH).unsqueeze(0)
    ids = torch.randint(1, VOCAB, (n, 1)) + position
    ids = (ids - 1) % (VOCAB - 1) + 1
    attention_mask = (position < lengths).long()
    return ids * attention_mask, attention_mask


def corrupt(ids, attention_mask, prob=0.5):
    flip = (torch.rand(ids.shape) < prob) & (attention_mask == 1)
    flip[:, 0] = False
    guess = torch.randint(1, VOCAB, ids.shape)
    return torch.where(flip, guess, ids)


model = TokenDiscriminator()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loss_fct = nn.CrossEntropyLoss()

for step in range(301):
    ids, attention_mask = sentences(32)
    g_pred = corrupt(ids, attention_mask)
    replaced = (g_pred != ids) * attention_mask
    e_labels = replaced.long()
    scores = model(g_pred)
    loss = loss_fct(scores.view(-1, 2), e_labels.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        hit = (scores.argmax(-1) == replaced).float() * attention_mask
        print(f"step {step:3d} loss {loss.item():.4f} accuracy on words {(hit.sum() / attention_mask.sum()).item():.3f}")
