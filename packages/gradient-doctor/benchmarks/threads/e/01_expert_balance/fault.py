import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class SwitchGate(nn.Module):
    """top-1 router that remembers how unevenly it spread the tokens"""

    def __init__(self, d_model, n_expert):
        super().__init__()
        self.n_expert = n_expert
        self.proj = nn.Linear(d_model, n_expert)
        nn.init.normal_(self.proj.bias, std=1.5)
        self.loss = None
        self.share = None

    def forward(self, tokens):
        prob = F.softmax(self.proj(tokens), dim=-1)
        weight, choice = prob.max(-1)
        self.share = F.one_hot(choice, self.n_expert).float().mean(0)
        self.loss = self.n_expert * (self.share * prob.mean(0)).sum()
        return weight, choice


class MoEBlock(nn.Module):
    def __init__(self, d_model=16, n_expert=4):
        super().__init__()
        self.gate = SwitchGate(d_model, n_expert)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, 32), nn.GELU(), nn.Linear(32, d_model))
            for _ in range(n_expert)
        )

    def forward(self, tokens):
        weight, choice = self.gate(tokens)
        out = torch.zeros_like(tokens)
        for k, expert in enumerate(self.experts):
            picked = choice == k
            if picked.any():
                out[picked] = weight[picked].unsqueeze(-1) * expert(tokens[picked])
        return tokens + out


class Net(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(MoEBlock() for _ in range(depth))
        self.readout = nn.Linear(16, 5)

    def forward(self, tokens):
        for block in self.blocks:
            tokens = block(tokens)
        return self.readout(tokens)


def reduce_balance_loss(net):
    collected = [block.gate.loss for block in net.blocks]
    return torch.tensor(collected).mean()


net = Net()
optim = torch.optim.Adam(net.parameters(), lr=3e-3)
teacher = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 5)).requires_grad_(False)
for it in range(301):
    tokens = torch.randn(128, 16)
    label = teacher(tokens).argmax(-1)
    lm_loss = F.cross_entropy(net(tokens), label)
    balance = reduce_balance_loss(net)
    loss = lm_loss + 0.1 * balance
    optim.zero_grad()
    loss.backward()
    optim.step()
    if it % 60 == 0:
        busiest = max(b.gate.share.max().item() for b in net.blocks)
        print(f"it {it} lm {lm_loss.item():.3f} balance {balance.item():.3f} busiest expert {busiest:.2f}")
