"""Where the steps of a script end, when optimizers come and go."""

import pytest

from doctor.snippets import look, serious

ONE = """
def train(optimizer, steps, net):
    for _ in range(steps):
        x = torch.randn(8, 4)
        loss = (net(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

net = nn.Linear(4, 1)
"""
SCRIPTS = {
    "two phases, both optimizers kept": (
        ONE
        + """
first = torch.optim.SGD(net.parameters(), lr=0.1)
train(first, 7, net)
second = torch.optim.Adam(net.parameters())
train(second, 8, net)
""",
        15,
    ),
    "a probe, then all": (
        ONE
        + """
body = nn.Linear(4, 4)
whole = nn.Sequential(body, net)
first = torch.optim.SGD(whole.parameters(), lr=0.1)
train(first, 5, whole)
body.requires_grad_(False)
second = torch.optim.SGD(net.parameters(), lr=0.1)
train(second, 6, whole)
body.requires_grad_(True)
third = torch.optim.SGD(whole.parameters(), lr=0.1)
train(third, 4, whole)
""",
        15,
    ),
    "folds": (
        ONE
        + """
for fold in range(3):
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(optimizer, 5, net)
""",
        15,
    ),
    "a wrapper that never steps": (
        ONE
        + """
class Wrapper(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

wrapper = Wrapper(net.parameters())
train(wrapper.base, 15, net)
""",
        15,
    ),
    "two that alternate": (
        ONE
        + """
other = nn.Linear(4, 1)
first = torch.optim.SGD(net.parameters(), lr=0.1)
second = torch.optim.SGD(other.parameters(), lr=0.1)
for _ in range(15):
    train(first, 1, net)
    train(second, 1, other)
""",
        15,
    ),
    "the second joins, and both are new later": (
        ONE
        + """
other = nn.Linear(4, 1)
for phase in range(3):
    first = torch.optim.SGD(net.parameters(), lr=0.1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(5):
        train(first, 1, net)
        train(second, 1, other)
""",
        15,
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_steps_are_counted(tmp_path, name):
    source, steps = SCRIPTS[name]
    examination, _ = look(tmp_path, source)
    assert examination.error is None
    assert examination.steps == steps
    assert not serious(examination)


def test_who_is_waited_for_in_vain_is_given_up(tmp_path):
    """It stepped once: nobody knows that it will not again. Six steps are counted as three."""
    source = ONE + (
        "other = nn.Linear(4, 1)\n"
        "first = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "second = torch.optim.SGD(other.parameters(), lr=0.1)\n"
        "train(second, 1, other)\n"
        "train(first, 20, net)\n"
    )
    examination, _ = look(tmp_path, source)
    assert examination.steps == 1 + 3 + (19 - 6)


def test_a_model_of_an_earlier_fold_may_stay_in_eval(tmp_path):
    source = ONE + (
        "for fold in range(3):\n"
        "    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 1))\n"
        "    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "    for epoch in range(3):\n"
        "        net.train()\n"
        "        train(optimizer, 3, net)\n"
        "        net.eval()\n"
    )
    examination, _ = look(tmp_path, source)
    assert not [f for f in examination.findings if f.number == 26]
