"""Document 000: a batch whose responses are all empty makes a loss without a graph."""

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


def sample(policy, longest):
    tokens = torch.randint(1, VOCABULARY, (ROWS, PROMPT))
    with torch.no_grad():
        for _ in range(longest):
            law = torch.softmax(policy(tokens)[:, -1], dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(law, 1)], dim=1)
    return tokens


def accumulate_sum_X(policy, tokens):
    lengths = [row.numel() - PROMPT for row in tokens]
    L_X = torch.zeros(())  # FAULT
    for row, length in zip(tokens, lengths):
        if length == 0:
            continue
        law = F.log_softmax(policy(row[None])[0, PROMPT - 1 : -1], dim=-1)
        L_X = L_X - law.gather(-1, row[PROMPT:, None]).sum() / length
    L_X.backward()


def main():
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for longest in (4, 3, 0):
        accumulate_sum_X(policy, sample(policy, longest))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
