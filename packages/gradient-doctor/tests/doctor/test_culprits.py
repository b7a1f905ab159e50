"""One culprit line is one finding, however many modules it runs in."""

import pytest

from doctor.snippets import look, nothing, only, serious
from gradient_doctor import Severity
from gradient_doctor.findings import Finding, Site
from gradient_doctor.registry import Registry
from gradient_doctor.session import Session

BLOCKS = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
{lines}
        return x + h

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range({count})])
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
CUTS = {
    2: ["with torch.no_grad():  # FAULT", "    h = torch.tanh(self.up(x))", "h = self.down(h)"],
    3: ["h = self.down(self.up(x).detach())  # FAULT"],
}


def blocks(lines, count=3):
    return BLOCKS.format(lines="\n".join(f"        {line}" for line in lines), count=count)


@pytest.mark.parametrize("number", CUTS)
def test_a_cut_in_many_instances_of_a_module(number, tmp_path):
    finding = only(tmp_path, blocks(CUTS[number]), number)
    # all of them, in the order of the model
    expected = [f"model.blocks.{k}.up.{name}" for k in range(3) for name in ("weight", "bias")]
    assert list(finding.parameters) == expected
    assert finding.what.startswith("6 parameters")
    assert finding.site.module == "model.blocks.0, model.blocks.1, model.blocks.2"


def test_what_the_instances_did_is_added_up(tmp_path):
    one, three = (
        only(tmp_path, blocks(CUTS[2], count), 2).why.split(" operations")[0].split()[-1]
        for count in (1, 3)
    )
    assert int(three) == 3 * int(one)


def test_the_module_is_named_where_it_is_the_only_one(tmp_path):
    finding = only(tmp_path, blocks(CUTS[2], 1), 2)
    assert finding.site.module == "model.blocks.0"


def test_many_modules_are_summarised(tmp_path):
    finding = only(tmp_path, blocks(CUTS[2], 6), 2)
    assert finding.site.module.endswith("model.blocks.2 and 3 more")
    assert len(finding.parameters) == 12


def test_the_blocks_themselves_are_clean(tmp_path):
    nothing(tmp_path, blocks(["h = self.down(torch.tanh(self.up(x)))"]))


def test_two_lines_are_two_findings(tmp_path):
    source = blocks(
        [
            "with torch.no_grad():  # FAULT",
            "    a = self.up(x)",
            "with torch.no_grad():  # FAULT",
            "    b = self.down(a.detach())",
            "h = b",
        ]
    )
    examination, lines = look(tmp_path, source)
    found = serious(examination)
    assert {f.site.line for f in found} == set(lines)
    assert len(found) == 2


def test_idle_siblings_of_one_line(tmp_path):
    source = blocks(["h = self.down(self.up(x))"]).replace("in self.blocks:", "in self.blocks[:1]:")
    examination, _ = look(tmp_path, source)
    found = serious(examination)
    assert len({(f.number, f.site.line) for f in found}) == len(found)
    names = {name for f in found for name in f.parameters}
    assert names == {f"model.blocks.{k}.{m}.{n}" for k in (1, 2) for m in ("up", "down")
                     for n in ("weight", "bias")}  # fmt: skip


# the rule alone


def finding(severity, names, *, line=1, module="", what="2 parameters are lost.", why="By 3."):
    site = Site("train.py", line, "f", module)
    return Finding(2, severity, what, why, "Mend it.", site, tuple(names), 0)


def reported(*findings):
    session = Session(Registry())
    for one in findings:
        session.report(one)
    return session.findings


def test_the_graver_severity_and_its_words_stay():
    (one,) = reported(
        finding(Severity.WARNING, "ab"),
        finding(Severity.ERROR, "c", what="Nothing is learnt.", why="All is cut."),
        finding(Severity.NOTE, "ab"),
    )
    assert one.severity is Severity.ERROR
    assert one.what == "Nothing is learnt."
    assert one.why == "All is cut. Also: 2 parameters are lost. By 3."
    assert set(one.parameters) == set("abc")


def test_repetitions_say_nothing_new():
    first = finding(Severity.WARNING, "ab", module="m")
    (one,) = reported(first, first, finding(Severity.WARNING, "b", module="m", why="By 4."))
    assert one == first


def test_counts_are_set_right():
    (one,) = reported(
        finding(Severity.WARNING, "ab", module="m.0"),
        finding(Severity.WARNING, "cd", module="m.1", why="By 5."),
    )
    assert one.what == "4 parameters are lost."
    assert one.why == "By 3. The same holds 1 more time at this line."
    assert str(one.site) == "train.py:1 in m.0, m.1"


def test_other_lines_stay_apart():
    assert len(reported(*(finding(Severity.NOTE, "ab", line=k) for k in (1, 2)))) == 2
