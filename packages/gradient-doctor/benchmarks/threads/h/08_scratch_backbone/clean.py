import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride=2, padding=1), nn.LeakyReLU(0.1))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = block(1, 6)
        self.layer1 = block(6, 12)
        self.layer2 = block(12, 16)
        self.layer3 = block(16, 16)

    def forward(self, x):
        return self.layer3(self.layer2(self.layer1(self.stem(x))))


def build_backbone(weights=None):
    net = Backbone()
    if weights is not None:
        net.load_state_dict(weights)
    for name, p in net.named_parameters():
        if weights is not None and not name.startswith(("layer2", "layer3")):
            p.requires_grad_(False)
    return net


class Detector(nn.Module):
    """Predicts centre and size of the single bright box."""

    def __init__(self, weights=None):
        super().__init__()
        self.backbone = build_backbone(weights)
        self.box = nn.Linear(16 * 4, 4)

    def forward(self, x):
        return self.box(self.backbone(x).flatten(1))


def scenes(n, size=32):
    img = 0.1 * torch.randn(n, 1, size, size)
    box = torch.zeros(n, 4)
    for i in range(n):
        w, h = torch.randint(4, 12, (2,)).tolist()
        x = torch.randint(0, size - w, (1,)).item()
        y = torch.randint(0, size - h, (1,)).item()
        img[i, 0, y:y + h, x:x + w] += 1.0
        box[i] = torch.tensor([x + w / 2, y + h / 2, w, h]) / size
    return img, box


images, boxes = scenes(256)
model = Detector()
first = model.backbone.stem[0].weight.detach().clone()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
for epoch in range(41):
    for i in range(0, 256, 64):
        loss = F.smooth_l1_loss(model(images[i:i + 64]), boxes[i:i + 64], beta=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 8 == 0:
        moved = (model.backbone.stem[0].weight.detach() - first).abs().max().item()
        print(f"epoch {epoch} loss {loss.item():.4f} stem moved {moved:.4f}")
