import torch
import torch.nn as nn

torch.manual_seed(3)


class TaskBalancer(nn.Module):
    """Two regression heads, each loss weighted by a learned log-variance."""

    def __init__(self, heads):
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self.log_var = nn.Parameter(torch.zeros(len(heads)))
        self.mse = nn.MSELoss()

    def forward(self, x, targets):
        losses = [self.mse(head(x).squeeze(-1), t) for head, t in zip(self.heads, targets)]
        per_task = torch.Tensor(losses)
        total = (torch.exp(-self.log_var) * per_task + self.log_var).sum()
        return total, per_task


def make_head():
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))


x = torch.randn(256, 6)
price = x[:, 0] * 1.5 - x[:, 1] + 0.3 * torch.randn(256)
rent = torch.sin(x[:, 2]) + 0.5 * x[:, 3] + 0.3 * torch.randn(256)

net = TaskBalancer([make_head(), make_head()])
opt = torch.optim.Adam(net.parameters(), lr=1e-2)

for step in range(200):
    opt.zero_grad()
    total, per_task = net(x, [price, rent])
    total.backward()
    opt.step()
    if step % 40 == 0 or step == 199:
        a, b = per_task.tolist()
        print(f"step {step:3d}  total {total.item():.3f}  price {a:.3f}  rent {b:.3f}")
