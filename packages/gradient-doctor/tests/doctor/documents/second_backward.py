"""Document 003, issue 4: the RL loss runs backward through the graph of the main loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal


class PolicyRL(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.pi_mean = nn.Linear(16, 8)

    def refine_prompt(self, prompt):
        law = Normal(self.pi_mean(torch.tanh(self.trunk(prompt))), 0.3)
        shift = law.rsample()
        log_prob = law.log_prob(shift.detach()).sum(-1)
        return prompt + shift, {"log_prob": log_prob, "entropy": law.entropy().sum(-1)}

    def update(self, info, reward, optimizer):
        loss = -(info["log_prob"] * reward).mean() - 0.01 * info["entropy"].mean()
        optimizer.zero_grad()
        loss.backward()  # FAULT
        optimizer.step()


def main():
    torch.manual_seed(0)
    qwen, policy, agent = nn.Linear(15, 8), PolicyRL(), nn.Linear(8, 10)
    optimizer = torch.optim.AdamW([*qwen.parameters(), *agent.parameters()], lr=1e-3)
    rl_optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(4):
        features, colour = torch.randn(6, 15), torch.randint(0, 10, (6,))
        refined, info = policy.refine_prompt(qwen(features))
        logits = agent(refined)
        loss = F.cross_entropy(logits, colour)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reward = (logits.argmax(-1) == colour).float() * 5.0
        policy.update(info, reward, rl_optimizer)


if __name__ == "__main__":
    main()
