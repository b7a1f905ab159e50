import torch
import torch.nn as nn
import torch.nn.functional as F


class Learner(nn.Module):
    """Neuromodulatory gate + prediction head; only the head adapts in the inner loop."""

    def __init__(self, dim=10, hidden=24):
        super().__init__()
        self.nm = nn.Linear(dim, dim)
        self.head = nn.ParameterList([
            nn.Parameter(torch.randn(hidden, dim) * 0.2), nn.Parameter(torch.zeros(hidden)),
            nn.Parameter(torch.randn(1, hidden) * 0.2), nn.Parameter(torch.zeros(1))])

    def forward(self, x, fast):
        gated = x * torch.sigmoid(self.nm(x))
        h = torch.tanh(F.linear(gated, fast[0], fast[1]))
        return F.linear(h, fast[2], fast[3]).squeeze(-1)


class MetaLearner:
    def __init__(self, net, inner_lr=0.1, meta_lr=5e-3):
        self.net = net
        self.inner_lr = inner_lr
        self.opt = torch.optim.Adam(net.parameters(), lr=meta_lr)

    def inner_update(self, x, y, fast):
        loss = F.mse_loss(self.net(x, fast), y)
        grad = torch.autograd.grad(loss, fast, allow_unused=False, create_graph=True)
        return [p - self.inner_lr * g for p, g in zip(fast, grad)]

    def meta_step(self, tasks, inner_steps=4):
        losses = []
        for xs, ys, xq, yq in tasks:
            fast = list(self.net.head)
            for _ in range(inner_steps):
                fast = self.inner_update(xs, ys, fast)
            losses.append(F.mse_loss(self.net(xq, fast), yq))
        total = torch.stack(losses).mean()
        self.opt.zero_grad()
        total.backward()
        self.opt.step()
        return total.item()


def sample_task(shots=6, dim=10):
    # two informative coordinates, the others are distractors
    w = torch.randn(2)
    x = torch.randn(2 * shots, dim)
    y = x[:, :2] @ w
    return x[:shots], y[:shots], x[shots:], y[shots:]


def main():
    torch.manual_seed(0)
    learner = MetaLearner(Learner())
    window = []
    for step in range(1, 201):
        window.append(learner.meta_step([sample_task() for _ in range(4)]))
        if step % 40 == 0:
            print(f"meta step {step}: query loss {sum(window) / len(window):.4f}")
            window = []


if __name__ == "__main__":
    main()
