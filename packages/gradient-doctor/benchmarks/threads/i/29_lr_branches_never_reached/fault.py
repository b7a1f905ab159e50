import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(29)
EPOCHS, LR = 24, 0.1


class SmallNet(nn.Module):
    def __init__(self, dim=20, classes=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x):
        return self.net(x)


def adjust_learning_rate(optimizer, epoch):
    """Decrease the learning rate in three stages."""
    lr = LR
    if epoch >= 12:
        lr = LR * 0.1
    elif epoch >= 16:
        lr = LR * 0.01
    elif epoch >= 20:
        lr = LR * 0.001
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def perturb(model, x, step_size=0.1, epsilon=0.3, steps=3):
    with torch.no_grad():
        p_natural = F.softmax(model(x), dim=1)
    adv = x + 0.01 * torch.randn_like(x)
    for _ in range(steps):
        adv.requires_grad_(True)
        divergence = F.kl_div(F.log_softmax(model(adv), dim=1), p_natural, reduction="sum")
        grad, = torch.autograd.grad(divergence, adv)
        with torch.no_grad():
            adv = adv + step_size * grad.sign()
            adv = x + (adv - x).clamp(-epsilon, epsilon)
    return adv


def trades_loss(model, x, y, beta=2.0):
    adv = perturb(model, x)
    logits = model(x)
    robust = F.kl_div(F.log_softmax(model(adv), dim=1), F.softmax(logits, dim=1), reduction="batchmean")
    return F.cross_entropy(logits, y) + beta * robust


centers = torch.randn(4, 20)
y_all = torch.randint(0, 4, (512,))
x_all = centers[y_all] + torch.randn(512, 20)
model = SmallNet()
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
for epoch in range(EPOCHS):
    lr = adjust_learning_rate(optimizer, epoch)
    model.train()
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    total = 0.0
    for index in torch.randperm(512).split(64):
        loss = trades_loss(model, x_all[index], y_all[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / 8
    moved = (nn.utils.parameters_to_vector(model.parameters()).detach() - before).norm().item()
    if epoch % 2 == 1:
        print(f"epoch {epoch:2d}  lr {lr:.5f}  loss {total:.4f}  weights moved {moved:.4f}")
