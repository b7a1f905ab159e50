"""Class 4: frozen when backward comes, whatever requires_grad is at other times."""

import pytest

from doctor.look import look

TURNS = """\
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
first = torch.optim.Adam(net[0].parameters())
second = torch.optim.Adam(net[2].parameters())
for _ in range(8):
    loss = net(torch.randn(8, 4)).square().mean()
    first.zero_grad()
    second.zero_grad()
    loss.backward()
    first.step()
    for p in net[2].parameters():
        p.requires_grad = True
    second.step()
    for p in net[2].parameters():
        p.requires_grad = {last}  # HERE
"""


def test_thawed_for_the_step_alone(tmp_path):
    assert "holds only frozen" in look(tmp_path, TURNS.format(last="False")).one(4).what
    look(tmp_path, TURNS.format(last="True")).clean()


ADAPTERS = """\
class Low(nn.Linear):
    def __init__(self, size):
        super().__init__(size, size)
        self.lora_A = nn.Parameter(torch.randn(2, size))
        self.lora_B = nn.Parameter(torch.{second}(size, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T

body, head = nn.Sequential(Low(4), nn.Tanh(), Low(4)), nn.Linear(4, 1)
body.requires_grad_(False)  # HERE
optimizer = torch.optim.Adam(head.parameters())
for _ in range(6):
    loss = head(body(torch.randn(8, 4))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_new_adapters_that_a_freeze_took_too(tmp_path):
    look(tmp_path, ADAPTERS.format(second="zeros")).one(4)


def test_trained_adapters_may_rest(tmp_path):
    look(tmp_path, ADAPTERS.format(second="randn")).clean()


NAMED = """\
net = nn.Sequential()
net.add_module("body", nn.Linear(4, 6))
net.add_module("head", nn.Linear(6, 2))
for name, p in net.named_parameters():
    {choose}
net.head.bias.requires_grad_(True)
optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
for _ in range(4):
    loss = net(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
CHOICES = [
    "p.requires_grad = '{part}' in name  # HERE",
    "p.requires_grad = name.startswith('{part}')  # HERE",
    "p.requires_grad = not name.startswith('{part}')  # HERE",
    "if '{part}' not in name: p.requires_grad = False  # HERE",
]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_name_that_no_parameter_has(tmp_path, choice):
    look(tmp_path, NAMED.format(choose=choice.format(part="classifier"))).one(4)
    (tmp_path / "right").mkdir()  # sources are read once
    look(tmp_path / "right", NAMED.format(choose=choice.format(part="head"))).clean()


SWITCH = """\
def switch(module, on):
    for p in module.parameters():
        {guard}  # HERE
            p.requires_grad = on

def fit(steps):
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
    for _ in range(steps):
        loss = net(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
switch(net[0], False)
fit(6)
{later}
fit(6)
"""


@pytest.mark.parametrize(
    ("guard", "later", "wrong"),
    [
        ("if p.requires_grad:", "switch(net[0], on=True)", True),
        ("if p.requires_grad:", "", False),  # it is to stay frozen
        ("if p.dim():", "switch(net[0], True)", False),
    ],
)
def test_a_switch_that_cannot_thaw(tmp_path, guard, later, wrong):
    seen = look(tmp_path, SWITCH.format(guard=guard, later=later))
    if wrong:
        assert "stays frozen" in seen.one(4).what
    else:
        seen.clean()
