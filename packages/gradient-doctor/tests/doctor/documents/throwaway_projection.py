"""Document 003: a projection that is made anew in every forward when the widths differ."""

import torch
import torch.nn.functional as F
from torch import nn


class HybridPrompt(nn.Module):
    def __init__(self, prompt_dim=16):
        super().__init__()
        self.prompt_dim = prompt_dim
        self.numeric = nn.Linear(15, 24)

    def forward(self, features):
        hidden = torch.tanh(self.numeric(features))
        if hidden.shape[-1] != self.prompt_dim:
            project = nn.Linear(hidden.shape[-1], self.prompt_dim).to(hidden.device)  # FAULT
            hidden = project(hidden)
        return hidden


def main():
    torch.manual_seed(0)
    qwen, agent = HybridPrompt(), nn.Linear(16, 10)
    optimizer = torch.optim.AdamW([*qwen.parameters(), *agent.parameters()], lr=1e-3)
    for _ in range(4):
        features, colour = torch.randn(6, 15), torch.randint(0, 10, (6,))
        loss = F.cross_entropy(agent(qwen(features)), colour)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
