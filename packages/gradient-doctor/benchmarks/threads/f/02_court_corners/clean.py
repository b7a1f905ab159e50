import numpy as np
import torch
import torch.nn as nn


class CornerNet(nn.Module):
    def __init__(self, points=4):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 12, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(12)
        self.conv3 = nn.Conv2d(12, points, 3, padding=1)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return torch.sigmoid(self.conv3(x))


class CourtDataset(torch.utils.data.Dataset):
    """A bright rectangle, the target is a small blob at each of its corners."""

    def __init__(self, n, side=16, seed=0):
        self.rng = np.random.RandomState(seed)
        self.items = [self.draw(side) for _ in range(n)]

    def draw(self, side):
        top, left = self.rng.randint(1, 5, 2)
        bottom, right = self.rng.randint(10, side - 1, 2)
        frame = self.rng.normal(0, 0.1, (1, side, side))
        frame[0, top:bottom + 1, left:right + 1] += 1.0
        heat = np.zeros((4, side, side))
        yy, xx = np.mgrid[:side, :side]
        for k, (r, c) in enumerate([(top, left), (top, right), (bottom, left), (bottom, right)]):
            heat[k] = np.exp(-((yy - r) ** 2 + (xx - c) ** 2) / 2.0)
        return frame.astype("float32"), heat.astype("float32")

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def train(model, train_loader, optimizer, criterion, epoch):
    losses = []
    model.train()
    for iter_id, batch in enumerate(train_loader):
        out = model(batch[0])
        loss = criterion(out, batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
    print("train, epoch = {}, loss = {:.5f}, |g| = {:.4f}".format(epoch, np.mean(losses), norm))


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(CourtDataset(64), batch_size=8, shuffle=True)
    model = CornerNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0)
    for epoch in range(12):
        train(model, loader, optimizer, nn.MSELoss(), epoch)
