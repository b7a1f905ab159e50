import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)
PAD, VOCAB, MAX_LEN, DIM = 0, 40, 48, 48


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(MAX_LEN, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 96, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, ids, labels):
        t = ids.size(1)
        h = self.embed(ids) + self.pos(torch.arange(t))
        h = self.blocks(h, mask=nn.Transformer.generate_square_subsequent_mask(t))
        logits = self.lm_head(h)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
        return loss, logits


def sample():
    n = int(torch.randint(4, 9, (1,)))
    start = int(torch.randint(1, VOCAB, (1,)))
    return [(start - 1 + 2 * k) % (VOCAB - 1) + 1 for k in range(n)]


def collate(rows):
    input_ids = torch.full((len(rows), MAX_LEN), PAD)
    for i, row in enumerate(rows):
        input_ids[i, : len(row)] = torch.tensor(row)
    labels = input_ids.clone().masked_fill(input_ids == PAD, -100)
    return input_ids, labels


def text_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1), ignore_index=PAD)


def main():
    model = CausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(25):
        input_ids, labels = collate([sample() for _ in range(24)])
        loss, logits = model(input_ids, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            text = text_loss(logits.detach(), input_ids).item()
            print(f"step {step} loss {loss.item():.4f} answer loss {text:.4f}")


if __name__ == "__main__":
    main()
