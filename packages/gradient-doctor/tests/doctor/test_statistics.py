"""Class 26: a network in eval mode that follows another one's parameters, not its statistics."""

import pytest

from doctor.look import look
from doctor.snippets import nothing, only

TARGET = """
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
target = copy.deepcopy(net).requires_grad_(False).eval()
adam = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(5):
    x = torch.randn(16, 4)
    with torch.no_grad():
        y = x.sum(1, keepdim=True) + 0.5 * target(x)
    loss = F.mse_loss(net(x), y)
    adam.zero_grad()
    loss.backward()
    adam.step()
    for p, t in zip(net.parameters(), target.parameters()):
        {update}
    {rest}
"""
UPDATES = [
    "t.data.copy_(0.1 * p.data + 0.9 * t.data)",
    "t.data = 0.1 * p.data + 0.9 * t.data",
    "t.lerp_(p.detach(), 0.1)",
]


@pytest.mark.parametrize("update", UPDATES)
def test_parameters_alone(tmp_path, update):
    finding = only(tmp_path, TARGET.format(update=f"{update}  # FAULT", rest=""), 26)
    assert "buffers" in finding.fix


@pytest.mark.parametrize(
    "rest",
    [
        "[t.copy_(b) for b, t in zip(net.buffers(), target.buffers())]",
        "target.train()",
        "target.load_state_dict(net.state_dict())",
    ],
)
def test_statistics_that_come_along_or_are_its_own(tmp_path, rest):
    nothing(tmp_path, TARGET.format(update=UPDATES[0], rest=rest))


def test_without_statistics(tmp_path):
    source = TARGET.format(update=UPDATES[0], rest="")
    nothing(tmp_path, source.replace("1d(8)", "1d(8, track_running_stats=False)"))


def test_batch_norm_that_was_to_be_frozen_by_its_momentum(tmp_path):
    body = """\
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    for part in net:
        if isinstance(part, nn.BatchNorm1d):
            part.requires_grad_(False)
            {freeze}  # HERE
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
    for _ in range(4):
        loss = net(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """
    look(tmp_path, body.format(freeze="part.momentum = 0.0")).one(26)
    look(tmp_path, body.format(freeze="part.eval()")).clean()
    look(tmp_path, body.format(freeze="part.momentum = 0.01")).clean()
