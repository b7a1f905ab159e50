import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(8)
IN, HID, OUT = 16, 48, 5


class LowRankLinear(nn.Module):
    def __init__(self, linear, r=6, alpha=12):
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())
        self.lora_A = nn.Linear(linear.in_features, r, bias=False)
        self.lora_B = nn.Linear(r, linear.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / r

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + self.lora_B(self.lora_A(x)) * self.scaling


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(IN, HID)
        self.norm = nn.LayerNorm(HID)
        self.fc2 = nn.Linear(HID, HID)
        self.head = nn.Linear(HID, OUT)

    def forward(self, x):
        h = torch.tanh(self.norm(self.fc1(x)))
        return self.head(torch.tanh(self.fc2(h)))


def wrap(model, keep_original=True):
    for name in ("fc1", "fc2"):
        layer = LowRankLinear(getattr(model, name))
        if keep_original:
            nn.init.zeros_(layer.lora_A.weight)
        else:
            nn.init.kaiming_uniform_(layer.lora_A.weight, a=math.sqrt(5))
        setattr(model, name, layer)
    return model


def main():
    w1, w2 = torch.randn(IN, HID) / IN ** 0.5, torch.randn(HID, OUT) / HID ** 0.5
    model = wrap(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(30):
        x = torch.randn(64, IN)
        y = torch.tanh(x @ w1) @ w2
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    for name, p in model.named_parameters():
        if "lora" in name:
            print(name, f"{p.abs().sum().item():.4f}")


if __name__ == "__main__":
    main()
