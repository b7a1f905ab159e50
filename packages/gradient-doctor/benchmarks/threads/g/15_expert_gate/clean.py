import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(17)
rng = np.random.default_rng(17)
device = torch.device("cpu")


class MoE(nn.Module):
    def __init__(self, n_in, n_experts, device):
        super().__init__()
        self.device = device
        start = rng.normal(0.0, 0.05, size=(n_in, n_experts))
        self.w_gate = nn.Parameter(torch.from_numpy(start).to(self.device, torch.float32))
        self.experts = nn.ModuleList(nn.Linear(n_in, 1) for _ in range(n_experts))

    def forward(self, x):
        gates = torch.softmax(x @ self.w_gate, dim=1)
        outs = torch.cat([e(x) for e in self.experts], dim=1)
        return (gates * outs).sum(dim=1)


# three regimes, each with its own linear law
x = torch.randn(600, 5)
regime = (x[:, 0] > 0.4).long() + (x[:, 0] > -0.4).long()
laws = torch.tensor([[0., 2., 0., 1., 0.], [0., -2., 1., 0., 0.], [0., 0., -2., 0., 2.]])
y = (x * laws[regime]).sum(1)

model = MoE(5, 3, device)
before = model.w_gate.detach().clone()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
mse = nn.MSELoss()

for step in range(500):
    loss = mse(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 100 == 0 or step == 499:
        moved = (model.w_gate - before).abs().max().item()
        print(f"step {step:3d}  mse {loss.item():.4f}  gate moved {moved:.4f}")
