import torch
import torch.nn as nn

torch.manual_seed(73)


class GradientAccumulation:
    """Steps only after n_acc samples have been seen."""

    def __init__(self, n_acc=64):
        self.n_acc, self.count = n_acc, 0

    def ready(self, batch_size):
        self.count += batch_size
        if self.count < self.n_acc:
            return False
        self.count = 0
        return True


class Learner:
    def __init__(self, model, lr, bs, callback):
        self.model, self.bs, self.cb = model, bs, callback
        self.loss_func = nn.MSELoss()
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.8)

    def one_batch(self, x, y):
        loss = self.loss_func(self.model(x).squeeze(1), y)
        loss.backward()
        if self.cb.ready(len(x)):
            self.opt.step()
            self.opt.zero_grad()
        return loss.item()

    def fit(self, x, y, epochs):
        for epoch in range(epochs):
            losses = []
            for idx in torch.randperm(len(x)).split(self.bs):
                losses.append(self.one_batch(x[idx], y[idx]))
            if epoch % 3 == 0 or epoch == epochs - 1:
                print(f"epoch {epoch:2d}  mse {sum(losses) / len(losses):.4f}")


x = torch.randn(1024, 10)
y = torch.relu(x[:, 0] + x[:, 1]) - 0.5 * x[:, 2] * x[:, 3]
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
learn = Learner(model, lr=0.05, bs=4, callback=GradientAccumulation(64))
learn.fit(x, y, 13)
