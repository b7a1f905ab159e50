"""Class 32: an overlap that is minimised."""

import pytest

from doctor.snippets import nothing, only

MASKS = """
net = nn.Conv2d(3, 1, 3, padding=1)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

def overlap(p, t):
    shared = (p * t).sum(dim=(1, 2, 3))
    return (2 * shared + 1) / (p.sum(dim=(1, 2, 3)) + t.sum(dim=(1, 2, 3)) + 1)  # FAULT

for step in range(4):
    x = torch.randn(4, 3, 8, 8)
    t = (x[:, :1] > 0.3).float()
    p = net(x).sigmoid()
    {body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "body",
    [
        "loss = overlap(p, t).mean()",
        "loss = F.binary_cross_entropy(p, t) + 0.5 * overlap(p, t).mean()",
    ],
)
def test_minimised(tmp_path, body):
    assert "overlap" in only(tmp_path, MASKS.format(body=body), 32).what


@pytest.mark.parametrize(
    "body",
    [
        "loss = 1 - overlap(p, t).mean()",
        "loss = -overlap(p, t).log().mean()",
        "loss = F.binary_cross_entropy(p, t) - overlap(p, t).mean()",
        "loss = (1 - overlap(p, t)).pow(0.75).sum()",
        "loss = ((p - 0.5).abs() * t).sum() / t.sum()",
        "loss = (p * t).sum() / p.sum().detach()",
        "loss = (p * (1 - t)).sum() / (p.sum() + 1e-6)",
    ],
)
def test_maximised(tmp_path, body):
    nothing(tmp_path, MASKS.format(body=body))
