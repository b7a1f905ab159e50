import torch
import torch.nn as nn

torch.manual_seed(0)


class AdapterLinear(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.A = nn.Parameter((torch.randn(rank, base.in_features) / 4).to(torch.bfloat16))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.bfloat16))

    def forward(self, x):
        return self.base(x) + (x @ self.A.T) @ self.B.T


class MainParamsAdam:
    """Adam on fp32 copies of half precision parameters."""

    def __init__(self, params, lr):
        self.params = list(params)
        self.main = [p.detach().float().clone() for p in self.params]
        self.inner = torch.optim.Adam(self.main, lr=lr)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p, m in zip(self.params, self.main):
            m.grad = p.grad.float()
        self.inner.step()
        for p, m in zip(self.params, self.main):
            p.copy_(m)


def adapter_state(model):
    return {k: v.detach().clone() for k, v in model.named_parameters() if v.requires_grad}


def load_adapter(model, state):
    for name, param in model.named_parameters():
        if name in state:
            param.data.copy_(state[name])


def build(seed=0):
    torch.manual_seed(seed)
    return AdapterLinear(nn.Linear(24, 8))


shift = torch.randn(8, 24) / 3



def train(model, optimizer, steps, tag):
    for step in range(steps):
        x = torch.randn(64, 24)
        y = model.base(x.to(torch.bfloat16)).float() + x @ shift.T
        loss = (model(x.to(torch.bfloat16)).float() - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % (steps // 4) == 0 or step == 1:
            print(f"{tag} step {step:3d}  loss {loss.item():.4f}")


model = build()
train(model, MainParamsAdam([model.A, model.B], lr=1e-2), 300, "first run")
checkpoint = adapter_state(model)

model = build(seed=1)
load_adapter(model, checkpoint)
optimizer = MainParamsAdam([model.A, model.B], lr=1e-3)
train(model, optimizer, 80, "resumed")
