"""Class 33: which axes the norm of a gradient penalty takes together."""

import pytest

from doctor.snippets import nothing, only

CRITIC = """
critic = nn.Sequential(nn.Conv2d(2, 4, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1))
adam = torch.optim.Adam(critic.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(8, 2, 6, 6, requires_grad=True)
    gradients, = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    {norm}
    loss = critic(x).mean() + (norms - 1).square().mean()
    adam.zero_grad()
    loss.backward()
    adam.step()
"""
# distances of points: each of them has a slope of its own
SURFACE = """
net = nn.Sequential(nn.Linear(3, 16), nn.Softplus(), nn.Linear(16, 1))
adam = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(4):
    points = torch.randn(4, 9, 3, requires_grad=True)
    slopes, = torch.autograd.grad(net(points).sum(), points, create_graph=True)
    loss = net(points).abs().mean() + (slopes.norm(dim=-1) - 1).square().mean()
    adam.zero_grad()
    loss.backward()
    adam.step()
"""


@pytest.mark.parametrize(
    "norm",
    [
        "norms = gradients.norm(2, dim=1)",
        "norms = gradients.pow(2).sum(1).sqrt()",
        "norms = gradients.norm()",
    ],
)
def test_norms_of_pixels_and_of_the_batch(tmp_path, norm):
    only(tmp_path, CRITIC.format(norm=f"{norm}  # FAULT"), 33)


@pytest.mark.parametrize(
    "norm",
    [
        "norms = gradients.flatten(1).norm(2, dim=1)",
        "norms = (gradients**2).sum((1, 2, 3)).add(1e-12).sqrt()",
        "norms = gradients.norm(dim=1).norm(dim=1).norm(dim=1)",
    ],
)
def test_norms_of_samples(tmp_path, norm):
    nothing(tmp_path, CRITIC.format(norm=norm))


def test_norms_of_points(tmp_path):
    nothing(tmp_path, SURFACE)
