import torch
from torch import nn

torch.manual_seed(0)


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                e_w = p.grad * group["rho"] / (norm + 1e-12)
                p.add_(e_w)
                self.state[p]["e_w"] = e_w
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.state[p]["e_w"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum, self.count = self.sum + value * n, self.count + n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def batches(n=20, size=64):
    for _ in range(n):
        target = torch.randint(0, 4, (size,))
        images = torch.randn(size, 1, 8, 8)
        for i, t in enumerate(target.tolist()):
            images[i, 0, 4 * (t // 2) : 4 * (t // 2) + 4, 4 * (t % 2) : 4 * (t % 2) + 4] += 0.6
        yield images, target


def train(model, criterion, optimizer, epoch):
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    for images, target in batches():
        output = model(images)
        loss = criterion(output, target)
        loss.backward()
        optimizer.first_step(zero_grad=True)

        # second forward-backward pass
        criterion(output, target).backward()
        optimizer.second_step(zero_grad=True)

        losses.update(loss.item(), len(target))
        top1.update((output.argmax(1) == target).float().mean().item(), len(target))
    print(f"epoch {epoch} loss {losses.avg:.4f} acc@1 {100 * top1.avg:.1f}")


net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 4))
sam = SAM(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
for epoch in range(4):
    train(net, nn.CrossEntropyLoss(), sam, epoch)
