import torch
import torch.nn as nn

DIM, UNROLL = 6, 12


class MetaOptimizer(nn.Module):
    """Coordinate-wise recurrent update rule."""

    def __init__(self, num_layers=2, hidden=16):
        super().__init__()
        self.hidden = hidden
        self.linear1 = nn.Linear(1, hidden)
        self.lstms = []
        for _ in range(num_layers):
            self.lstms.append(nn.LSTMCell(hidden, hidden))
        self.linear2 = nn.Linear(hidden, 1)
        self.linear2.weight.data.mul_(0.1)
        self.linear2.bias.data.zero_()

    def init_state(self, n):
        return [(torch.zeros(n, self.hidden), torch.zeros(n, self.hidden)) for _ in self.lstms]

    def forward(self, grad, state):
        x = torch.tanh(self.linear1(grad.reshape(-1, 1)))
        new_state = []
        for cell, s in zip(self.lstms, state):
            h, c = cell(x, s)
            new_state.append((h, c))
            x = h
        return self.linear2(x).view_as(grad), new_state


def sample_problem(batch=8):
    W = torch.randn(batch, DIM, DIM) / DIM ** 0.5
    y = torch.randn(batch, DIM)
    return W, y


def objective(theta, W, y):
    return ((W @ theta.unsqueeze(-1)).squeeze(-1) - y).pow(2).sum(1)


def gradient(theta, W, y):
    r = (W @ theta.unsqueeze(-1)).squeeze(-1) - y
    return 2 * (W.transpose(1, 2) @ r.unsqueeze(-1)).squeeze(-1)


torch.manual_seed(0)
meta = MetaOptimizer()
opt = torch.optim.Adam(meta.parameters(), lr=5e-3)

history = []
for step in range(160):
    W, y = sample_problem()
    theta = torch.zeros(8, DIM)
    state = meta.init_state(theta.numel())
    total = 0.0
    for _ in range(UNROLL):
        update, state = meta(gradient(theta, W, y).detach(), state)
        theta = theta + update
        total = total + objective(theta, W, y).mean()
    opt.zero_grad()
    total.backward()
    opt.step()
    history.append(objective(theta, W, y).mean().item())
    if (step + 1) % 40 == 0:
        print(f"step {step + 1}: final objective {sum(history[-40:]) / 40:.4f}")
