"""Class 20: a maximum that always picks what a mask has filled in."""

import pytest

from doctor.look import look

LOOP = """\
encoder, order = nn.Linear(6, 4), nn.Linear(4, 2)
optimizer = torch.optim.Adam([*encoder.parameters(), *order.parameters()])
for step in range(4):
    x = torch.randn(8, 6)
    a, b = encoder(x), encoder(x + 0.1)
    rest = F.cross_entropy(order(a), torch.arange(8) % 2)
    near = a @ b.T
    own = torch.eye(8).bool()
{hardest}
    loss = rest + F.relu(hardest - near.diagonal() + 0.2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WRONG = {
    "filled": ("far = near.masked_fill(own, 1e9)  # HERE", "hardest = far.max(dim=1).values"),
    "through-a-view": (
        "far = near.clone()",
        "far.diagonal().fill_(-torch.inf)  # HERE",
        "hardest = -(1 - far).amax(1)",
    ),
    "chosen": (
        "far = torch.where(own, -1e4, near)  # HERE",
        "hardest = far.min(dim=1)[0]",
    ),
}
RIGHT = {
    "filled": ("hardest = near.masked_fill(own, -1e9).max(dim=1).values",),
    "distances": ("hardest = -(1 - near).masked_fill(own, 1e9).amin(1)",),
    "some": ("hardest = near.masked_fill(own & (torch.arange(8) < 2), 1e3).amax(1) / 1e3",),
}


def loop(tmp_path, lines):
    return look(tmp_path, LOOP.format(hardest="\n".join("    " + line for line in lines)))


@pytest.mark.parametrize("lines", WRONG.values(), ids=WRONG)
def test_the_fill_is_the_greatest_of_every_row(tmp_path, lines):
    assert "for every sample" in loop(tmp_path, lines).one(20).what


@pytest.mark.parametrize("lines", RIGHT.values(), ids=RIGHT)
def test_fills_that_lose(tmp_path, lines):
    loop(tmp_path, lines).clean()
