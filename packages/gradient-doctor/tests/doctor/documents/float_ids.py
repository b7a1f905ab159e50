"""Document 003: class ids as floats go into a KL divergence that wants distributions."""

import torch
import torch.nn.functional as F
from torch import nn

COLORS, SIZE = 10, 6


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(COLORS, 8)
        self.mix = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, COLORS, 1)

    def forward(self, grid):
        x = self.embed(grid).permute(0, 3, 1, 2)
        return self.head(torch.relu(self.mix(x)))


def efe_loss(logits, target):
    risk = F.kl_div(logits.log_softmax(1), target.float(), reduction="batchmean")  # FAULT
    return risk + 1e-3 * logits.square().mean()


def main():
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    for _ in range(3):
        grid = torch.randint(0, COLORS, (4, SIZE, SIZE))
        loss = efe_loss(agent(grid), grid.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
