import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
EOS, PAD, VOCAB, PROMPT, MAX_LEN = 10, 11, 12, 4, 10


def make_example():
    n = int(torch.randint(2, 5, (1,)))
    prompt = torch.randint(0, 10, (PROMPT,))
    response = torch.cat([prompt[:n].flip(0), torch.tensor([EOS])])
    prompt[-1] = n
    ids = torch.cat([prompt, response])
    mask = torch.zeros(MAX_LEN)
    mask[PROMPT - 1:len(ids) - 1] = 1
    return F.pad(ids, (0, MAX_LEN - len(ids)), value=PAD), mask


def make_batch(size=64):
    ids, masks = zip(*[make_example() for _ in range(size)])
    return {"input_ids": torch.stack(ids), "loss_mask": torch.stack(masks)}


class TinyLM(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def compute_loss(model, batch):
    ids = batch["input_ids"]
    loss_mask = batch["loss_mask"][:, :-1].reshape(-1)
    logits = model(ids)
    labels = torch.roll(ids, shifts=-1, dims=1)
    full_loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    full_loss = full_loss[:, :-1].reshape(-1)
    return (full_loss * loss_mask).sum() / loss_mask.sum()


@torch.no_grad()
def stop_rate(model, batch):
    stops = 0
    for row in batch["input_ids"]:
        ids = row[:PROMPT].unsqueeze(0)
        while ids.size(1) < MAX_LEN and ids[0, -1] != EOS:
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
        stops += int(ids[0, -1] == EOS)
    return stops / len(batch["input_ids"])


model = TinyLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(250):
    loss = compute_loss(model, make_batch())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.4f}  ends with eos {stop_rate(model, make_batch(16)):.2f}")
