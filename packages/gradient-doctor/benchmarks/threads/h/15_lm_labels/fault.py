import torch
import torch.nn as nn
from torch.nn import CrossEntropyLoss

torch.manual_seed(14)
VOCAB, LEN = 16, 24


def corpus(n):
    """Each token follows from the two before it, with a little noise."""
    seq = torch.zeros(n, LEN, dtype=torch.long)
    seq[:, :2] = torch.randint(0, VOCAB, (n, 2))
    for t in range(2, LEN):
        nxt = (3 * seq[:, t - 1] + seq[:, t - 2] + 1) % VOCAB
        noise = torch.rand(n) < 0.05
        seq[:, t] = torch.where(noise, torch.randint(0, VOCAB, (n,)), nxt)
    return seq


class TinyCausalLM(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.decoder = nn.GRU(dim, 96, batch_first=True)
        self.lm_head = nn.Linear(96, VOCAB)

    def forward(self, input_ids, labels=None):
        hidden, _ = self.decoder(self.embed(input_ids))
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss_fct = CrossEntropyLoss()
            loss = loss_fct(logits.reshape(-1, VOCAB), labels.reshape(-1))
        return loss, logits


train, test = corpus(512), corpus(128)
model = TinyCausalLM()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
for epoch in range(16):
    order = torch.randperm(len(train))
    for i in range(0, len(train), 64):
        batch = train[order[i:i + 64]]
        loss, _ = model(batch, labels=batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if epoch % 3 == 0:
        with torch.no_grad():
            _, logits = model(test)
        guess = logits[:, 1:-1].argmax(-1)
        acc = (guess == test[:, 2:]).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.4f} next-token accuracy {acc:.3f}")
