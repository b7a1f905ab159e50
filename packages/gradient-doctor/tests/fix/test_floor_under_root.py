"""The floor goes under the root, whatever stands there: the edited code adds it to the whole."""

from types import SimpleNamespace

import pytest

from gradient_doctor.fix.recipes.losses import floor_under_root
from gradient_doctor.fix.source import Source

FLOOR = 1e-8


@pytest.mark.parametrize(
    ("before", "under"),
    [
        ("torch.sqrt(x)", lambda x, y: x),
        ("torch.sqrt(x - y)", lambda x, y: x - y),
        ("torch.sqrt(-x)", lambda x, y: -x),
        ("torch.sqrt(x if flag else y)", lambda x, y: x),
        ("torch.sqrt(k | 1)", lambda x, y: 5),
        ("torch.sqrt((k > 1) & flag)", lambda x, y: 1),
        ("(x if flag else y).sqrt()", lambda x, y: x),
        ("(x - y).sqrt()", lambda x, y: x - y),
        ("x.sqrt()", lambda x, y: x),
    ],
)
def test_the_floor_is_added_to_all_that_is_under_the_root(before, under):
    source = Source("train.py", f"z = {before}\n".encode())
    finding = SimpleNamespace(site=SimpleNamespace(line=1), fix="Add a floor under the root.")
    (proposal,) = floor_under_root(finding, source)
    x, y, seen = 4.0, 9.0, []

    def sqrt(value):
        seen.append(value)
        return value

    text = source.edited(proposal.edits)
    places = {"x": x, "y": y, "k": 4, "flag": True}
    if before.endswith(".sqrt()"):
        root = Noted(seen)
        places |= {"x": root.of(x), "y": root.of(y)}
    exec(text, {**places, "torch": SimpleNamespace(sqrt=sqrt)})
    (value,) = seen
    assert float(value) == pytest.approx(float(under(x, y)) + FLOOR, abs=1e-12)


class Noted:
    """Numbers whose root is not taken but noted."""

    def __init__(self, seen):
        self.seen = seen

    def of(self, value):
        noted = self

        class Number(float):
            def __add__(self, other):
                return Number(float(self) + float(other))

            def __sub__(self, other):
                return Number(float(self) - float(other))

            def sqrt(self):
                noted.seen.append(float(self))

        return Number(value)


def test_a_star_is_left_alone():
    source = Source("train.py", b"z = torch.sqrt(*xs)\n")
    finding = SimpleNamespace(site=SimpleNamespace(line=1), fix="Add a floor under the root.")
    assert list(floor_under_root(finding, source)) == []
