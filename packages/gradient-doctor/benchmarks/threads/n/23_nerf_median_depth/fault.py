import torch
import torch.nn as nn

torch.manual_seed(0)
SAMPLES, NEAR, FAR = 32, 0.5, 4.0


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.density = nn.Linear(64, 1)
        self.color = nn.Linear(64, 3)

    def forward(self, points):
        hidden = self.trunk(points)
        return nn.functional.softplus(self.density(hidden)).squeeze(-1), self.color(hidden).sigmoid()


class DepthRenderer:
    def __init__(self, method="expected"):
        self.method = method

    def __call__(self, weights, steps):
        if self.method == "expected":
            return (weights * steps).sum(-1) / (weights.sum(-1) + 1e-6)
        cumulative = weights.cumsum(-1)
        split = torch.full((len(weights), 1), 0.5)
        index = torch.searchsorted(cumulative.contiguous(), split).clamp(0, SAMPLES - 1)
        return steps.gather(-1, index).squeeze(-1)


class NeRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = Field()
        self.renderer_depth = DepthRenderer(method="median")

    def forward(self, origins, directions):
        edges = torch.linspace(NEAR, FAR, SAMPLES + 1).expand(len(origins), -1)
        steps = (edges[:, 1:] + edges[:, :-1]) / 2
        density, rgb = self.field(origins[:, None] + directions[:, None] * steps[..., None])
        alpha = 1 - torch.exp(-density * (edges[:, 1:] - edges[:, :-1]))
        ones = torch.ones(len(alpha), 1)
        transmittance = torch.cat([ones, (1 - alpha + 1e-7).cumprod(-1)[:, :-1]], -1)
        weights = alpha * transmittance
        return (weights[..., None] * rgb).sum(1), self.renderer_depth(weights, steps)


def rays(n=128):
    origins = torch.cat([torch.rand(n, 2) - 0.5, torch.zeros(n, 1)], -1)
    directions = torch.tensor([0.0, 0.0, 1.0]).expand(n, 3)
    depth = 2.0 + torch.sin(3 * origins[:, 0])
    gray = torch.full((n, 3), 0.6)
    return origins, directions, gray, depth


model = NeRF()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(201):
    origins, directions, image, depth_image = rays()
    rgb, depth = model(origins, directions)
    rgb_loss = (rgb - image).pow(2).mean()
    depth_loss = (depth - depth_image).pow(2).mean()
    loss = rgb_loss + 0.1 * depth_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3d}  rgb {rgb_loss.item():.5f}  depth {depth_loss.item():.4f}")
