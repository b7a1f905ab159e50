import torch
import torch.nn as nn

torch.manual_seed(5)


class TwoStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.trunk(x))


def freeze(module):
    for p in module.parameters():
        p.requires_grad = False


def run(model, opt, x, y, steps, name):
    ce = nn.CrossEntropyLoss()
    for s in range(steps):
        opt.zero_grad(set_to_none=False)
        loss = ce(model(x), y)
        loss.backward()
        opt.step()
        if s % 20 == 0 or s == steps - 1:
            print(f"{name} {s:2d}  loss {loss.item():.4f}")


x = torch.randn(300, 8)
y_first = (x @ torch.randn(8, 3)).argmax(1)
y_second = (y_first + 1) % 3

model = TwoStage()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.95)
run(model, opt, x, y_first, 20, "first")

freeze(model.trunk)
kept = [p.detach().clone() for p in model.trunk.parameters()]
run(model, opt, x, y_second, 60, "second")
drift = max((p - k).abs().max().item() for p, k in zip(model.trunk.parameters(), kept))
print(f"largest change in the frozen trunk: {drift:.6f}")
