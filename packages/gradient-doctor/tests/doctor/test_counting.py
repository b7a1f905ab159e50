"""What "N parameters" counts: tensors, each once, whatever they are called."""

import pytest
import torch
from torch import nn

from doctor.snippets import look, only
from gradient_doctor.findings import Culprit, Finding, Severity, Site
from gradient_doctor.registry import Registry

BY_HAND = """
weights = [torch.randn(3, 3, requires_grad=True) for _ in range({number})]  # FAULT
body = nn.Linear(3, 3)
optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = body
        self.first, self.rest = nn.Parameter(torch.ones(3)), weights
    def forward(self, x):
        for weight in self.rest:
            x = torch.tanh(x @ weight)
        return self.body(x * self.first.detach())
net = Net()
for weight in weights:
    net.__dict__[f"w{{id(weight)}}"] = weight
for step in range(5):
    loss = net(torch.randn(8, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("number", [1, 2, 3])
def test_tensors_of_one_line_are_counted_one_by_one(tmp_path, number):
    """They stand in no module: one label for all would make them one, or "1 parameters"."""
    examination, _ = look(tmp_path, BY_HAND.format(number=number))
    (finding,) = [f for f in examination.findings if f.number == 7]
    plural = "" if number == 1 else "s"
    assert f"{number} parameter{plural} with a gradient in no optimizer" in finding.what
    assert len(set(finding.parameters)) == number
    assert f"{9 * number:,} numbers" in finding.why


TIED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, ids):
        with torch.no_grad():  # FAULT
            hidden = torch.tanh(self.body(self.embed(ids)))
        return hidden @ scale
scale = nn.Parameter(torch.randn(4, 9))
model = Model()
optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
for step in range(4):
    ids = torch.randint(9, (6,))
    loss = F.cross_entropy(model(ids), ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_tied_weight_is_one_parameter(tmp_path):
    finding = only(tmp_path, TIED, 2)
    assert "3 parameters that should train" in finding.what
    assert finding.parameters == ("model.embed.weight", "model.body.weight", "model.body.bias")


def test_a_contract_may_use_any_name_of_a_tied_weight():
    embed, head = nn.Embedding(9, 4), nn.Linear(4, 9)
    head.weight = embed.weight
    registry = Registry({"embed": embed, "head": head})
    assert list(registry.parameters()) == ["embed.weight", "head.bias"]
    mask = registry.bit(embed.weight)
    assert registry.matching(["head.weight"]) == registry.matching(["embed.*"]) == mask
    assert registry.many(mask) == "1 parameter"
    assert registry.many(registry.matching(["head.*"])) == "2 parameters"


def test_labels_of_living_tensors_differ_and_those_of_dead_ones_are_used_again():
    registry = Registry()
    first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))
    names = registry.names(registry.bits([first, second]))
    assert names == ("<unregistered [2]>", "<unregistered [2], number 2>")
    assert registry.name(second) == names[1]
    del first
    third = torch.zeros(2, requires_grad=True)
    assert registry.name(third) == names[0]


@pytest.mark.parametrize(("counted", "written"), [(1, "1 parameter"), (3, "3 parameters")])
def test_findings_that_are_joined_count_again(counted, written):
    """All parts of one line; the number that the first of them said is put right."""
    names = tuple(f"m.{k}" for k in range(counted))
    parts = [
        Finding(20, Severity.WARNING, f"The gradient of {k} is zero.", "w", "f", Site("a.py", 1), n)
        for k, n in (("2 parameters", ("m.0", "m.0")), ("1 parameter", names))
    ]
    culprit = Culprit(parts[0])
    for part in parts:
        culprit.add(part, lambda names: tuple(sorted(names)))
    assert culprit.whole.what == f"The gradient of {written} is zero."
