import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(26)
IN, HID = 10, 32


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(IN, HID), nn.ReLU(), nn.Linear(HID, HID), nn.ReLU())
        self.head1, self.head2 = nn.Linear(HID, 1), nn.Linear(HID, 1)

    def forward(self, x):
        h = self.shared(x)
        return self.head1(h), self.head2(h)


def get_batch(n=64):
    x = torch.randn(n, IN)
    return x, x[:, :3].sum(1, keepdim=True), 10 * x[:, 3:4] * x[:, 4:5]


def main():
    model = MultiTask()
    weights = nn.Parameter(torch.ones(2))
    opt_model = torch.optim.Adam(model.parameters(), lr=5e-3)
    opt_weights = torch.optim.Adam([weights], lr=2e-2)
    first = None
    for step in range(15):
        x, y1, y2 = get_batch()
        out1, out2 = model(x)
        l1 = weights[0] * F.mse_loss(out1, y1)
        l2 = weights[1] * F.mse_loss(out2, y2)
        if first is None:
            first = torch.stack([l1, l2]).detach()

        param = list(model.shared[2].parameters())
        g1 = torch.autograd.grad(l1, param[0].clone(), retain_graph=True, create_graph=True)[0].norm()
        g2 = torch.autograd.grad(l2, param[0].clone(), retain_graph=True, create_graph=True)[0].norm()
        mean = ((g1 + g2) / 2).detach()
        rate = torch.stack([l1, l2]).detach() / first
        rate = rate / rate.mean()
        balance = (g1 - mean * rate[0]).abs() + (g2 - mean * rate[1]).abs()

        opt_model.zero_grad()
        (l1 + l2).backward(retain_graph=True)
        opt_weights.zero_grad()
        weights.grad = torch.autograd.grad(balance, weights)[0]
        opt_model.step()
        opt_weights.step()
        with torch.no_grad():
            weights.mul_(2 / weights.sum())
        if step % 3 == 0:
            print(f"step {step} loss {(l1 + l2).item():.3f} weights {weights.tolist()}")


if __name__ == "__main__":
    main()
