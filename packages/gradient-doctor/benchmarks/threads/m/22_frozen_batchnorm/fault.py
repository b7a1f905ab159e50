import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class SegNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Conv2d(16, classes, 1)

    def forward(self, x):
        return self.head(self.body(x))


def freeze_bn(module):
    if isinstance(module, nn.BatchNorm2d):
        module.momentum = 0.0
        for p in module.parameters():
            p.requires_grad = False


def batch(size, gain, offset):
    label = torch.randint(0, 3, (size, 1, 4, 4)).float()
    label = F.interpolate(label, scale_factor=4, mode="nearest").squeeze(1).long()
    image = label.unsqueeze(1).float() - 1 + 0.4 * torch.randn(size, 1, 16, 16)
    return gain * image + offset, label


def fit(model, steps, size, gain, offset, frozen):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=3e-3)
    for step in range(steps):
        model.train()
        if frozen:
            model.apply(freeze_bn)
        x, y = batch(size, gain, offset)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            print(f"{'fine-tune' if frozen else 'pretrain'} step {step + 1}: loss {loss.item():.4f}")


def test(model, gain, offset):
    model.eval()
    with torch.no_grad():
        x, y = batch(64, gain, offset)
        return (model(x).argmax(1) == y).float().mean().item()


net = SegNet()
fit(net, 75, 16, gain=1.0, offset=0.0, frozen=False)
print(f"source accuracy {test(net, 1.0, 0.0):.3f}")
net.apply(freeze_bn)
fit(net, 100, 2, gain=2.5, offset=1.5, frozen=True)
print(f"target accuracy {test(net, 2.5, 1.5):.3f}")
