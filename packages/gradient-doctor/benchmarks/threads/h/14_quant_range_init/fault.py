import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(13)


def round_ste(v):
    return v + (v.round() - v).detach()


class SymmetricQuantizer(nn.Module):
    def __init__(self, bits=3):
        super().__init__()
        self.levels = 2 ** (bits - 1) - 1
        self.scale = nn.Parameter(torch.ones(1))
        self.collecting = False
        self.seen = 0.0

    def forward(self, x):
        if self.collecting:
            self.seen = max(self.seen, x.abs().max().item())
            return x
        step = self.scale / self.levels
        return round_ste((x / step).clamp(-self.levels, self.levels)) * step

    def apply_range(self):
        self.scale = nn.Parameter(torch.tensor([self.seen]))
        self.collecting = False


class QuantNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 32), nn.Linear(32, 1)
        self.q1, self.q2 = SymmetricQuantizer(), SymmetricQuantizer()

    def forward(self, x):
        h = torch.relu(self.fc1(self.q1(x)))
        return self.fc2(self.q2(h))


def init_ranges(model, x):
    quantizers = [m for m in model.modules() if isinstance(m, SymmetricQuantizer)]
    for q in quantizers:
        q.collecting = True
    with torch.no_grad():
        model(x)
    for q in quantizers:
        q.apply_range()


x = torch.randn(512, 8)
x[0] *= 8.0
y = (x.clamp(-2, 2)[:, :4].sum(1, keepdim=True)).tanh()

model = QuantNet()
optimizer = torch.optim.Adam([
    {"params": [p for n, p in model.named_parameters() if "scale" not in n], "lr": 3e-3},
    {"params": [p for n, p in model.named_parameters() if "scale" in n], "lr": 3e-2},
])
init_ranges(model, x)
print("initial scales", [round(q.scale.item(), 3) for q in (model.q1, model.q2)])
for epoch in range(301):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 60 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f} scales {model.q1.scale.item():.3f} {model.q2.scale.item():.3f}")
