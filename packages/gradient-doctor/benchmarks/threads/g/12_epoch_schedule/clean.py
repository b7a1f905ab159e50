import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(13)


class ShapedNet(nn.Module):
    def __init__(self, n_in, n_out, units=(64, 32)):
        super().__init__()
        layers, prev = [], n_in
        for u in units:
            layers += [nn.Linear(prev, u), nn.ReLU()]
            prev = u
        layers.append(nn.Linear(prev, n_out))
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)


class Trainer:
    def __init__(self, model, lr=0.05, gamma=0.8):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=gamma)
        self.criterion = nn.CrossEntropyLoss()

    def train_epoch(self, loader):
        self.model.train()
        loss_sum, count = 0.0, 0
        for x, y in loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            loss_sum += loss.item() * len(y)
            count += len(y)
        self.scheduler.step()
        return loss_sum / count


x = torch.randn(1024, 12)
y = ((x[:, 0] * x[:, 1] > 0).long() + 2 * (x[:, 2] > 0.3).long())
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
trainer = Trainer(ShapedNet(12, 4))

for epoch in range(15):
    mean_loss = trainer.train_epoch(loader)
    lr = trainer.optimizer.param_groups[0]["lr"]
    if epoch % 3 == 0 or epoch == 14:
        print(f"epoch {epoch:2d}  loss {mean_loss:.4f}  lr {lr:.2e}")
