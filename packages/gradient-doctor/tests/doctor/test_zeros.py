"""Class 20: connected, but the gradient is exactly zero."""

import pytest

from doctor.look import look, names
from doctor.snippets import nothing

LOOP = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.gate = nn.Linear(8, 1)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        self.last = nn.Linear(8, 1)
        {init}

    def forward(self, x):
        h = torch.tanh(self.first(x))
        {middle}
        return self.last(h).squeeze(-1)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    x = torch.randn(6, 4)
    error = (model(x) - x.sum(-1)).square()
    {weight}
    optimizer.zero_grad()
    loss = (error * weight).mean()
    loss.backward()
    optimizer.step()
"""
ADAPTER = "h = h + self.up(self.down(h)) + 0.0 * self.gate(h)"
GATED = "h = h * torch.sigmoid(self.gate(h)) + self.up(self.down(h))"


def loop(tmp_path, middle=GATED, init="pass", weight="weight = torch.ones(6)", steps=4):
    return look(tmp_path, LOOP.format(middle=middle, init=init, weight=weight, steps=steps))


FAULTS = {
    "softmax-over-one": (
        {"middle": GATED.replace("torch.sigmoid(self.gate(h))", "self.gate(h).softmax(-1)")},
        {"gate.weight", "gate.bias"},
        "size 1",
    ),
    "dead-relu": (
        {"middle": "h = F.relu(self.down(h) - 99.0) @ self.up.weight.T + h + self.gate(h)"},
        {"down.weight", "up.weight"},
        "dead",
    ),
    "saturated": (
        {"middle": GATED.replace("self.gate(h)", "self.gate(h) + 500.0")},
        {"gate.weight", "gate.bias"},
        "saturated",
    ),
    "clamped": (
        {"middle": GATED.replace("self.gate(h)", "self.gate(h).clamp(5.0, 6.0)")},
        {"gate.weight", "gate.bias"},
        "cuts off",
    ),
    "both-factors-zero": (
        {
            "middle": GATED,
            "init": "nn.init.zeros_(self.down.weight); nn.init.zeros_(self.up.weight)",
        },
        {"down.weight", "up.weight"},
        "Both factors",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_operation_that_stops_the_gradient_is_named(tmp_path, fault):
    options, parameters, said = FAULTS[fault]
    where = "init" if fault == "both-factors-zero" else "middle"
    options = {**options, where: options[where] + "  # HERE"}
    finding = loop(tmp_path, **options).one(20)
    assert parameters <= names(finding)
    assert "last.weight" not in names(finding) or fault == "dead-relu"
    assert said in finding.what


def test_zero_advantages_are_traced_to_the_line_that_made_them(tmp_path):
    weight = (
        "reward = torch.ones(6); weight = (reward - reward.mean()) / (reward.std() + 1e-6)  # HERE"
    )
    finding = loop(tmp_path, weight=weight).one(20)
    assert len(finding.parameters) == 8


CLEAN = {
    "plain": {},
    "lora": {"init": "nn.init.zeros_(self.up.weight)"},
    "softmax-over-rows": {
        "middle": GATED.replace("torch.sigmoid(self.gate(h))", "self.gate(h).softmax(0)")
    },
    "weight-zero-on-purpose": {"middle": ADAPTER},
    "zero-once": {"weight": "weight = torch.full((6,), float(step != 1))"},
}


@pytest.mark.parametrize("options", CLEAN.values(), ids=CLEAN)
def test_zeros_that_pass_or_are_meant(tmp_path, options):
    loop(tmp_path, **options).clean()


def test_one_step_alone_proves_only_what_no_training_changes(tmp_path):
    structural = FAULTS["softmax-over-one"][0]
    assert loop(tmp_path, **structural, steps=1).of(20)[0].severity == 3
    assert loop(tmp_path, **FAULTS["saturated"][0], steps=1).of(20)[0].severity == 1


ZERO_WEIGHTS = """\
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
for p in model.parameters():
    {init}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_weights_that_all_start_at_zero(tmp_path):
    found = look(tmp_path, ZERO_WEIGHTS.format(init="nn.init.zeros_(p)  # HERE"))
    assert "zeros are for biases" in found.one(20).fix


def test_biases_that_start_at_zero(tmp_path):
    look(tmp_path, ZERO_WEIGHTS.format(init="p.dim() > 1 or nn.init.zeros_(p)")).clean()


HELD_DOWN = """\
first, last = nn.Linear(4, 8), nn.Linear(8, 2)
nn.init.constant_(first.bias, {bias}){here}
optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
for step in range(4):
    x = torch.randn(8, 4)
    loss = F.cross_entropy(last(F.relu(first(x))), torch.arange(8) % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_line_of_a_bias_that_keeps_all_units_shut(tmp_path):
    from doctor.look import look as look_at

    look_at(tmp_path, HELD_DOWN.format(bias=-40.0, here="  # HERE")).one(20)
    look_at(tmp_path, HELD_DOWN.format(bias=-0.5, here="")).clean()


def test_a_bias_that_falls_out_of_a_distance(tmp_path):
    source = """
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
adam = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(5):
    same = (torch.arange(16) % 2).float()
    a, b = torch.randn(16, 6), torch.randn(16, 6)
    apart = F.pairwise_distance(net(a), net(b))
    far = (0.001 - apart).clamp(min=0).pow(2)
    loss = (same * apart.pow(2) + (1 - same) * far).mean()
    adam.zero_grad()
    loss.backward()
    adam.step()
"""
    nothing(tmp_path, source)
