"""Document 000: lengths that come out as 0 leave a loss without a graph, two calls later."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, PROMPT, ROWS = 11, 5, 4


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.body = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens))[0])


def sample(policy, padding):
    """Prompts padded on the left, and four tokens after them."""
    tokens = torch.randint(1, VOCABULARY, (ROWS, PROMPT))
    tokens[:, :padding] = 0
    with torch.no_grad():
        for _ in range(4):
            law = torch.softmax(policy(tokens)[:, -1], dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(law, 1)], dim=1)
    return tokens, (tokens != 0).long()


def response_lengths(mask, padded_width):
    return [max(0, int(row.sum()) - padded_width) for row in mask]  # FAULT


def accumulate_sum_X(policy, tokens, lengths):
    L_X = torch.zeros(())
    for row, length in zip(tokens, lengths):
        if length == 0:
            continue
        law = F.log_softmax(policy(row[None])[0, -length - 1 : -1], dim=-1)
        L_X = L_X - law.gather(-1, row[-length:, None]).sum() / length
    L_X.backward()


def main():
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for padding in (0, 1, 4):
        tokens, mask = sample(policy, padding)
        lengths = response_lengths(mask, PROMPT)
        accumulate_sum_X(policy, tokens, lengths)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
