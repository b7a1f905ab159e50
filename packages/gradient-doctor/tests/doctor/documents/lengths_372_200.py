"""Document 001, issue 1: 372 = prompt 173 + generated 200 - 1 positions against 200."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, PROMPT, GENERATED, ROWS = 13, 173, 200, 2


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def compute_entropy_gradients_only(policy, tokens, mask):
    logits = policy(tokens)[:, :-1]  # FAULT
    law = F.log_softmax(logits, dim=-1)
    log_prob = law.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropy = -(log_prob.detach() * log_prob * mask).sum() / mask.sum()  # FAULT
    entropy.backward()


def main():
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for _ in range(2):
        prompt = torch.randint(1, VOCABULARY, (ROWS, PROMPT))
        generated = torch.randint(1, VOCABULARY, (ROWS, GENERATED))
        mask = (torch.arange(GENERATED) < torch.tensor([[150], [200]])).float()
        compute_entropy_gradients_only(policy, torch.cat([prompt, generated], dim=1), mask)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
