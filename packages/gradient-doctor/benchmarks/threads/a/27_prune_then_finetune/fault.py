import torch
import torch.nn as nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self, d=10, hidden=48):
        super().__init__()
        self.fc1 = nn.Linear(d, hidden)
        self.fc2 = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x))).squeeze(-1)


def speedup(model, keep):
    """Drop the weakest hidden units and shrink both layers."""
    score = model.fc1.weight.abs().sum(1) * model.fc2.weight.abs().squeeze(0)
    idx = score.topk(keep).indices
    fc1 = nn.Linear(model.fc1.in_features, keep)
    fc2 = nn.Linear(keep, 1)
    fc1.load_state_dict({"weight": model.fc1.weight[idx].detach(), "bias": model.fc1.bias[idx].detach()})
    fc2.load_state_dict({"weight": model.fc2.weight[:, idx].detach(), "bias": model.fc2.bias.detach()})
    model.fc1, model.fc2 = fc1, fc2


def run(model, optimizer, x, y, steps, tag):
    for step in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0 or step == steps - 1:
            print(f"{tag} step {step:2d} loss {loss.item():.4f}")


def main():
    x = torch.randn(256, 10)
    y = torch.sin(x[:, 0]) + x[:, 1] * 0.5 - x[:, 2].abs()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    run(model, optimizer, x, y, 12, "train")
    speedup(model, keep=16)
    run(model, optimizer, x, y, 15, "finetune")


main()
