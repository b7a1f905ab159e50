import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
DIGITS, SEP, EOS = 8, 8, 9
PAD = 10
VOCAB, MAX_LEN = 11, 14


class Collator:
    """Pads prompt + completion and makes labels for the completion."""

    def __init__(self, pad_token_id, ignore_index=-100):
        self.pad, self.ignore = pad_token_id, ignore_index

    def __call__(self, examples):
        input_ids = torch.full((len(examples), MAX_LEN), self.pad)
        for row, ids in zip(input_ids, examples):
            row[: len(ids)] = torch.tensor(ids)
        labels = input_ids.clone()
        labels[labels == self.pad] = self.ignore
        prompt = (input_ids == SEP).long().cumsum(1) == 0
        labels[prompt] = self.ignore
        return input_ids, labels


class TinyLM(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, 64, batch_first=True)
        self.lm_head = nn.Linear(64, VOCAB)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def example():
    n = int(torch.randint(2, 6, (1,)))
    first = int(torch.randint(0, DIGITS, (1,)))
    return [n, first, SEP] + [(first + k) % DIGITS for k in range(n)] + [EOS]


@torch.no_grad()
def generate(model, n, first):
    ids = [n, first, SEP]
    while len(ids) < MAX_LEN:
        token = model(torch.tensor([ids]))[0, -1].argmax().item()
        if token == EOS:
            break
        ids.append(token)
    return ids[3:]


collate = Collator(PAD)
model = TinyLM()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(201):
    input_ids, labels = collate([example() for _ in range(32)])
    logits = model(input_ids[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}  generated for (3, 4): {generate(model, 3, 4)}")
