"""Statements that Python accepts and that do nothing: the line is read from the source."""

import pytest

from doctor.snippets import look, nothing, only, serious

LOOP = """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
{before}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    {step}
"""


def script(before="", step="optimizer.step()"):
    return LOOP.format(before=before, step=step)


def test_a_step_without_parentheses(tmp_path):
    finding = only(tmp_path, script(step="optimizer.step  # FAULT"), 21)
    assert "without parentheses" in finding.why


@pytest.mark.parametrize(
    "freeze",
    [
        "model[0].requires_grad = False  # FAULT",
        "for p in model[0].parameters():\n    p.require_grad = False  # FAULT",
    ],
)
def test_a_switch_that_does_not_exist(tmp_path, freeze):
    finding = only(tmp_path, script(freeze), 4)
    assert finding.parameters == ("model.0.weight", "model.0.bias")
    assert "froze nothing" in finding.what


def test_a_rate_that_nobody_reads(tmp_path):
    step = "optimizer.step()\n    optimizer.lr = 0.1 / (step + 2)  # FAULT"
    finding = only(tmp_path, script(step=step), 31)
    assert "param_groups" in finding.why


@pytest.mark.parametrize(
    "freeze",
    [
        "model[0].requires_grad_(False)",
        "model[0].requires_grad = True",
        "model[0].weight.requires_grad = False",
    ],
)
def test_switches_that_exist(tmp_path, freeze):
    examination, _ = look(tmp_path, script(freeze))
    assert not [f for f in serious(examination) if "froze nothing" in f.what]


def test_a_rate_in_the_groups(tmp_path):
    step = "optimizer.step()\n    optimizer.param_groups[0]['lr'] = 0.1 / (step + 1)"
    nothing(tmp_path, script(step=step))
