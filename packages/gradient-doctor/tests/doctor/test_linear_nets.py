"""Class 29: networks that are linear from the data to the loss."""

import pytest

from doctor.look import look

LOOP = """\
x = torch.randn(64, 2)
y = {target}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, {width}), nn.Linear({width}, 1)

    def forward(self, x):
        h = {between}(self.first(x))
        return self.second(h)  # HERE


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
for step in range({steps}):
    loss = F.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FAULT = {"target": "x.prod(-1, keepdim=True)", "width": 8, "between": "", "steps": 120}


def test_a_linear_network_that_gets_stuck(tmp_path):
    finding = look(tmp_path, LOOP.format(**FAULT)).one(29)
    assert "widths 2, 8, 1" in finding.why


LEFT = {
    "an-activation": {"between": "torch.tanh"},
    "a-linear-target": {"target": "x.sum(-1, keepdim=True) + 0.1 * torch.randn(64, 1)"},
    "narrower-inside": {"target": "torch.randn(64, 3)", "width": 1},
    "too-short-to-know": {"steps": 20},
}


@pytest.mark.parametrize("change", LEFT.values(), ids=LEFT)
def test_what_is_left_in_peace(tmp_path, change):
    source = LOOP.format(**{**FAULT, **change})
    if change.get("width") == 1:
        source = source.replace("nn.Linear(1, 1)", "nn.Linear(1, 3)")
    look(tmp_path, source).clean()


def test_layers_of_a_list_are_named_where_they_are_made(tmp_path):
    source = LOOP.format(**FAULT).replace("  # HERE", "")
    layers = "net = nn.Sequential(\n    nn.Linear(2, 8),\n    nn.Linear(8, 1),  # HERE\n)"
    look(tmp_path, source.replace("net = Net()", layers)).one(29)
