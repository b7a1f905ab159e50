import torch
import torch.nn as nn

torch.manual_seed(0)


def wasserstein_loss(pred, target, tau=1.0):
    """Distance of boxes (x, y, w, h) taken as Gaussians."""
    xy_distance = (pred[:, :2] - target[:, :2]).square().sum(-1)
    wh_distance = (pred[:, 2:] - target[:, 2:]).square().sum(-1) / 4
    distance = (xy_distance + wh_distance).clamp(1e-7).sqrt()
    return (1 - 1 / (tau + torch.log1p(distance))).mean()


class BoxHead(nn.Module):
    """Moves an anchor to the object; starts from the anchor itself."""

    def __init__(self, n_in=10, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, 4))
        nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)

    def forward(self, feats, anchors):
        delta = self.net(feats)
        xy = anchors[:, :2] + delta[:, :2] * anchors[:, 2:]
        return torch.cat([xy, anchors[:, 2:] * delta[:, 2:].exp()], 1)


MIX = torch.randn(4, 10)


def matched_anchors(n=64):
    anchors = torch.tensor([[4.0, 4.0, 2.0, 2.0], [8.0, 4.0, 2.0, 4.0]])[torch.randint(0, 2, (n,))]
    offset = torch.randint(-2, 3, (n, 4)).float() * 0.25
    objects = anchors + offset * (torch.rand(n, 1) < 0.9)
    feats = (objects - anchors) @ MIX + 0.05 * torch.randn(n, 10)
    return feats, anchors, objects


def train(steps=160):
    head = BoxHead()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for step in range(steps):
        feats, anchors, objects = matched_anchors()
        loss = wasserstein_loss(head(feats, anchors), objects)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 32 == 0 or step == steps - 1:
            print(f"step {step:3d} loss {loss.item():.4f}")


train()
