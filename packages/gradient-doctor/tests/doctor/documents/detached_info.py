"""Document 003's repair of issue 4: RL info is detached, so the policy never learns."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal


class PolicyRL(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.pi_mean = nn.Linear(16, 8)
        self.forward_model = nn.Linear(8, 8)

    def refine_prompt(self, prompt):
        prompt = prompt.detach()
        law = Normal(self.pi_mean(torch.tanh(self.trunk(prompt))), 0.3)
        shift = law.sample()
        log_prob = law.log_prob(shift).sum(-1)
        return prompt + shift, {"log_prob": log_prob, "prompt": prompt}

    def update(self, info, refined, reward, optimizer):
        curiosity = F.mse_loss(self.forward_model(info["prompt"]), refined)
        loss = -(info["log_prob"] * reward).mean() + 0.1 * curiosity
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    torch.manual_seed(0)
    policy, agent = PolicyRL(), nn.Linear(8, 10)
    optimizer = torch.optim.AdamW(agent.parameters(), lr=1e-3)
    rl_optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(4):
        prompt, colour = torch.randn(6, 8), torch.randint(0, 10, (6,))
        refined, rl_info = policy.refine_prompt(prompt)
        rl_info = {k: v.detach() for k, v in rl_info.items()}  # FAULT
        logits = agent(refined)
        loss = F.cross_entropy(logits, colour)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reward = (logits.argmax(-1) == colour).float() * 5.0
        policy.update(rl_info, refined, reward, rl_optimizer)


if __name__ == "__main__":
    main()
