import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
N_CLASSES, TEMPERATURE = 6, 3.0
TRUTH = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, N_CLASSES)).requires_grad_(False)
for weight in TRUTH.parameters():
    weight.mul_(3.0)


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def clean_data(n):
    data = torch.randn(n, 10)
    return data, TRUTH(data).argmax(1)


class Configs:
    """Distil a large model into a small one; the small one has few, partly wrong labels."""

    def __init__(self):
        self.large, self.small = mlp(10, 128, 128, N_CLASSES), mlp(10, 32, N_CLASSES)
        self.optimizer = torch.optim.Adam(self.small.parameters(), lr=5e-3)
        self.kl_div_loss = nn.KLDivLoss(log_target=True, reduction="batchmean")
        self.loss_func = nn.CrossEntropyLoss()
        self.data, target = clean_data(1500)
        wrong = torch.rand(len(target)) < 0.5
        self.target = torch.where(wrong, torch.randint(0, N_CLASSES, target.shape), target)

    def train_large(self):
        opt = torch.optim.Adam(self.large.parameters(), lr=2e-3)
        for _ in range(500):
            data, target = clean_data(256)
            opt.zero_grad()
            self.loss_func(self.large(data), target).backward()
            opt.step()

    def step(self, data, target):
        with torch.no_grad():
            large_logits = self.large(data)
        output = self.small(data)

        soft_targets = nn.functional.log_softmax(large_logits / TEMPERATURE, dim=-1)
        soft_prob = nn.functional.log_softmax(large_logits / TEMPERATURE, dim=-1)
        soft_targets_loss = self.kl_div_loss(soft_prob, soft_targets) * TEMPERATURE ** 2
        label_loss = self.loss_func(output, target)
        loss = 0.9 * soft_targets_loss + 0.1 * label_loss

        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return soft_targets_loss.item(), label_loss.item()

    def run(self, epochs=24):
        test, truth = clean_data(4000)
        for epoch in range(1, epochs + 1):
            parts = [self.step(self.data[i], self.target[i]) for i in torch.randperm(1500).split(64)]
            if epoch % 6 == 0:
                soft, hard = (sum(p) / len(p) for p in zip(*parts))
                with torch.no_grad():
                    small, large = [(m(test).argmax(1) == truth).float().mean() for m in (self.small, self.large)]
                print(f"epoch {epoch} soft {soft:.4f} label {hard:.4f} small {small:.3f} large {large:.3f}")


conf = Configs()
conf.train_large()
conf.run()
