import torch
import torch.nn as nn
from torch.func import functional_call

torch.manual_seed(0)


class MetaLearner:
    """Learns a start from which one gradient step fits a new wave."""

    def __init__(self, inner_lr=0.1, outer_lr=0.005):
        self.model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
        self.criterion = nn.MSELoss()
        self.inner_lr = inner_lr
        self.meta_optimizer = torch.optim.Adam(self.model.parameters(), lr=outer_lr)

    def inner_update(self, x, y):
        start = dict(self.model.named_parameters())
        loss = self.criterion(functional_call(self.model, start, (x,)), y)
        grads = torch.autograd.grad(loss, tuple(start.values()), create_graph=True)
        return {k: p - self.inner_lr * g for (k, p), g in zip(start.items(), grads)}

    def meta_step(self, tasks):
        meta_loss = 0.0
        for support_x, support_y, query_x, query_y in tasks:
            adapted = self.inner_update(support_x, support_y)
            prediction = functional_call(self.model, adapted, (query_x,))
            meta_loss = meta_loss + self.criterion(prediction, query_y)
        meta_loss = meta_loss / len(tasks)
        self.meta_optimizer.zero_grad()
        meta_loss.backward()
        self.meta_optimizer.step()
        return meta_loss.item()


def sample_tasks(n=8, shots=10):
    tasks = []
    for _ in range(n):
        height, phase = 1.0 + torch.rand(1), torch.rand(1)
        x = torch.rand(2 * shots, 1) * 6 - 3
        y = height * torch.sin(x + phase)
        tasks.append((x[:shots], y[:shots], x[shots:], y[shots:]))
    return tasks


def main(steps=120):
    learner = MetaLearner()
    for step in range(steps):
        loss = learner.meta_step(sample_tasks())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d} loss after adaptation {loss:.4f}")


main()
