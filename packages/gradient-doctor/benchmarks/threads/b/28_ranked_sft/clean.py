import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(27)
VOCAB, SEQ, DIM, IGNORE = 24, 14, 48, -100


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.rnn(self.embed(input_ids))[0])
        if labels is None:
            return None, logits
        shift_logits = logits[:, :-1].reshape(-1, VOCAB)
        loss = F.cross_entropy(shift_logits, labels[:, 1:].reshape(-1), ignore_index=IGNORE)
        return loss, logits


class Collator:
    def __call__(self, rows):
        input_ids = torch.stack(rows)
        labels = input_ids.clone()
        return {"input_ids": input_ids, "labels": labels}


def row():
    start, step = torch.randint(VOCAB, (1,)), 5
    return (start + step * torch.arange(SEQ)) % VOCAB


@torch.no_grad()
def next_token_accuracy(model):
    ids = torch.stack([row() for _ in range(64)])
    _, logits = model(ids)
    return (logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean().item()


def main():
    model, collate = CausalLM(), Collator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(30):
        batch = collate([row() for _ in range(32)])
        loss, _ = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0 or step == 29:
            print(f"step {step} loss {loss.item():.4f} next token accuracy {next_token_accuracy(model):.3f}")


if __name__ == "__main__":
    main()
