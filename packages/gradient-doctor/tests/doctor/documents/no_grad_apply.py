"""Document 003, issue 2: a no_grad decorator on `apply` freezes the prompt encoder."""

import torch
import torch.nn.functional as F
from torch import nn


class PromptEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.numeric = nn.Linear(15, 16)
        self.out = nn.Linear(16, 16)

    def forward(self, features):
        return self.out(F.silu(self.numeric(features)))


class Refiner:
    @torch.no_grad()  # FAULT
    def apply(self, prompt, control):
        refined = prompt + 0.1 * control
        return F.normalize(refined, dim=-1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.Linear(9 + 16, 32)
        self.colour = nn.Linear(32, 9 * 10)

    def forward(self, grid, prompt):
        hidden = torch.relu(self.cells(torch.cat([grid, prompt], dim=-1)))
        return self.colour(hidden).view(-1, 9, 10)


def main():
    torch.manual_seed(0)
    qwen, refiner, agent = PromptEncoder(), Refiner(), Agent()
    optimizer = torch.optim.AdamW([*qwen.parameters(), *agent.parameters()], lr=1e-3)
    for _ in range(4):
        grid, target = torch.rand(6, 9), torch.randint(0, 10, (6, 9))
        prompt = qwen(torch.randn(6, 15))
        refined = refiner.apply(prompt, torch.randn(6, 16))
        loss = F.cross_entropy(agent(grid, refined).transpose(1, 2), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
