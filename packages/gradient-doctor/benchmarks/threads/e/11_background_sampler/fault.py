import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)


class Backbone(nn.Module):
    def __init__(self, dim=20, width=32, classes=5):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        feat = self.body(x)
        return feat, self.fc(feat)


class Trainer:
    """classifier plus a head that scores how hard a sample is (used later to resample the background)"""

    def __init__(self):
        self.model = Backbone()
        self.weighter = nn.Linear(32, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.optimizer_w = torch.optim.Adam(self.weighter.parameters(), lr=0.01)
        self.centre = 0.8 * torch.randn(5, 20)
        self.steps = 0

    def batch(self, n=64):
        y = torch.randint(0, 5, (n,))
        return self.centre[y] + torch.randn(n, 20), y

    def update(self):
        x, y = self.batch()
        feat, logits = self.model(x)
        ce = F.cross_entropy(logits, y, reduction="none")
        loss = ce.mean()
        hard = F.softplus(self.weighter(feat)).squeeze(1)
        loss_w = 0.1 * F.mse_loss(hard, ce.detach())

        self.optimizer.zero_grad()
        self.optimizer_w.zero_grad()
        loss.backward(retain_graph=True)
        self.optimizer.step()
        loss_w.backward()
        self.optimizer_w.step()
        self.steps += 1
        return loss.item(), loss_w.item()

    def run(self, steps=120):
        for _ in range(steps):
            loss, loss_w = self.update()
            if self.steps % 30 == 0:
                print(f"{self.steps:4d} loss {loss:.4f} difficulty {loss_w:.4f}")


Trainer().run()
