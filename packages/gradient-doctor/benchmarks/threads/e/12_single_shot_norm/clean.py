import torch
import torch.nn as nn
import torch.nn.init as init

torch.manual_seed(0)


class L2Norm(nn.Module):
    def __init__(self, n_channels, scale):
        super().__init__()
        self.eps = 1e-10
        self.weight = nn.Parameter(torch.Tensor(n_channels))
        init.constant_(self.weight, scale)

    def forward(self, x):
        norm = x.pow(2).sum(dim=1, keepdim=True).sqrt() + self.eps
        x = x / norm
        return self.weight.view(1, -1, 1, 1) * x


class TinySSD(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.base = nn.ModuleList([
            nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.LeakyReLU(0.1),
        ])
        self.extra = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU())
        self.norm = L2Norm(16, 10.0)
        self.loc = nn.ModuleList([nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)])
        self.conf = nn.ModuleList([nn.Conv2d(16, classes, 3, padding=1), nn.Conv2d(16, classes, 3, padding=1)])

    def forward(self, x):
        for layer in self.base:
            x = layer(x)
        sources = [self.norm(x), self.extra(x)]
        loc = [f(s).permute(0, 2, 3, 1).reshape(len(x), -1, 4) for f, s in zip(self.loc, sources)]
        conf = [f(s).permute(0, 2, 3, 1).reshape(len(x), -1, 3) for f, s in zip(self.conf, sources)]
        return torch.cat(loc, 1), torch.cat(conf, 1)


def fetch(n=8, size=16):
    img = 0.3 * torch.randn(n, 3, size, size)
    boxes, labels = torch.zeros(n, 80, 4), torch.zeros(n, 80, dtype=torch.long)
    for i in range(n):
        cls = 1 + i % 2
        cy, cx = torch.randint(2, 6, (2,)).tolist()
        img[i, cls, 2 * cy - 2 : 2 * cy + 2, 2 * cx - 2 : 2 * cx + 2] += 2.0
        for cell in (8 * cy + cx, 64 + 4 * (cy // 2) + cx // 2):
            labels[i, cell] = cls
            boxes[i, cell] = torch.tensor([cy / 8, cx / 8, 0.25, 0.25])
    return img, boxes, labels


def multibox(loc, conf, boxes, labels):
    pos = labels > 0
    l_loc = nn.functional.smooth_l1_loss(loc[pos], boxes[pos], reduction="sum")
    l_conf = nn.functional.cross_entropy(conf.flatten(0, 1), labels.flatten(), reduction="sum")
    return l_loc / pos.sum(), l_conf / pos.sum()


def train():
    net = TinySSD()
    optimizer = torch.optim.SGD(net.parameters(), lr=5e-4, momentum=0.9, weight_decay=5e-4)
    for iteration in range(121):
        images, boxes, labels = fetch()
        loss_l, loss_c = multibox(*net(images), boxes, labels)
        optimizer.zero_grad()
        (loss_l + loss_c).backward()
        optimizer.step()
        if iteration % 30 == 0:
            print(f"iter {iteration} loc {loss_l.item():.3f} conf {loss_c.item():.3f}")


train()
