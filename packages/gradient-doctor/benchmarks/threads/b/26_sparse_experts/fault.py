import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(25)
DIM, EXPERTS, TOP_K = 16, 4, 1


class MoE(nn.Module):
    def __init__(self, k=TOP_K):
        super().__init__()
        self.k = k
        self.w_gate = nn.Parameter(torch.randn(DIM, EXPERTS) * 0.1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM)) for _ in range(EXPERTS)
        )

    def gating(self, x):
        logits = x @ self.w_gate
        top_logits, top_idx = logits.topk(self.k, dim=-1)
        top_gates = F.softmax(top_logits, dim=-1)
        return torch.zeros_like(logits).scatter(-1, top_idx, top_gates)

    def forward(self, x):
        gates = self.gating(x)
        out = torch.stack([e(x) for e in self.experts], dim=-1)
        return (out * gates.unsqueeze(-2)).sum(-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(8, DIM), MoE(), nn.Linear(DIM, 3)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        return self.out(h + self.moe(h))


def get_batch(n=64):
    x = torch.randn(n, 8)
    y = ((x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long())
    return x, y


def train():
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    gate0 = model.moe.w_gate.detach().clone()
    for step in range(25):
        x, y = get_batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f} gate grad {model.moe.w_gate.grad.abs().max().item():.2e}")
    print("gate change", (model.moe.w_gate - gate0).abs().max().item())


if __name__ == "__main__":
    train()
