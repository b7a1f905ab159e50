"""Gradients that come at first and then no more: a cut that begins after the traced steps."""

import pytest

from doctor.snippets import look, only, serious

SCRIPT = """
body = nn.Linear(4, 8)
head = nn.Linear(8, 3)
aux = nn.Linear(8, 1)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters(), *aux.parameters()], lr=0.1)
for step in range({steps}):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
{body}
    optimizer.zero_grad({zero})
    loss.backward()
    optimizer.step()
"""
ALL = "F.cross_entropy(head(hidden), y) + aux(hidden).square().mean()"


def script(*lines, steps=120, zero=""):
    return SCRIPT.format(body="\n".join(f"    {line}" for line in lines), steps=steps, zero=zero)


def cut(when, **options):
    return script(
        "hidden = body(x)",
        f"if {when}:",
        "    hidden = hidden.detach()  # FAULT",
        f"loss = {ALL}",
        **options,
    )


@pytest.mark.parametrize("zero", ["", "set_to_none=False"])
@pytest.mark.parametrize("steps", [60, 120])
def test_a_cut_that_begins_later_is_told(tmp_path, steps, zero):
    """At the end of a short run too."""
    finding = only(tmp_path, cut("step >= 20", steps=steps, zero=zero), 3)
    assert finding.parameters == ("body.weight", "body.bias")
    assert finding.what == "2 parameters received gradients until step 2, and none from step 50 on."
    assert "`detach` at" in finding.why


def test_a_region_that_begins_later_is_told(tmp_path):
    finding = only(
        tmp_path,
        script(
            "with torch.set_grad_enabled(step < 20):  # FAULT",
            "    hidden = body(x)",
            f"loss = {ALL}",
        ),
        2,
    )
    assert finding.parameters == ("body.weight", "body.bias")


def test_a_second_phase_with_an_optimizer_of_its_own(tmp_path):
    source = """
body, head = nn.Linear(4, 8), nn.Linear(8, 3)
def run(optimizer, steps, cut):
    for _ in range(steps):
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        hidden = body(x)
        if cut:
            hidden = hidden.detach()  # FAULT
        loss = F.cross_entropy(head(hidden), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
run(torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1), 20, False)
run(torch.optim.Adam([*body.parameters(), *head.parameters()]), 100, True)
"""
    assert only(tmp_path, source, 3).parameters == ("body.weight", "body.bias")


@pytest.mark.parametrize(
    "when", ["step % 2", "step % 7 > 1", "40 <= step < 70", "step // 10 % 2", "step == 50"]
)
def test_turns_and_pauses_are_no_fault(tmp_path, when):
    examination, _ = look(tmp_path, cut(when, steps=160))
    assert not serious(examination), examination.findings


def test_a_cut_that_ends_takes_it_back(tmp_path):
    """It is said at step 100, and is not true from 130 on, between two looks."""
    assert only(tmp_path, cut("20 <= step < 130", steps=129), 3)
    examination, _ = look(tmp_path, cut("20 <= step < 130", steps=140))
    assert not serious(examination), examination.findings


CLEAN = {
    "a loss that ends": (
        "hidden = body(x)",
        "loss = F.cross_entropy(head(hidden), y)",
        "if step < 20:",
        "    loss = loss + aux(hidden).square().mean()",
    ),
    "a loss that ends, and a target that was always cut": (
        "hidden = body(x)",
        "loss = F.cross_entropy(head(hidden), y)",
        "if step < 20:",
        "    loss = loss + aux(hidden).square().mean()",
        "loss = loss + (hidden.mean() - aux(hidden).detach().mean()).square()",
    ),
    "frozen later": (
        "body.requires_grad_(step < 20)",
        "hidden = body(x)",
        f"loss = {ALL}",
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_ends_on_purpose_is_at_most_a_note(tmp_path, name):
    examination, _ = look(tmp_path, script(*CLEAN[name], steps=160))
    found = serious(examination)
    assert not found, "\n".join(map(str, found))
    said = [f for f in examination.findings if "and none from step" in f.what]
    assert [f.number for f in said] == ([5] if "loss" in name else [])


def test_an_optimizer_that_rests_is_not_asked(tmp_path):
    """A first phase trains the body, by an optimizer that does not step in the second."""
    source = """
body, head = nn.Linear(4, 8), nn.Linear(8, 3)
def run(optimizer, cut):
    for _ in range(110):
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        hidden = body(x).tanh()
        hidden = hidden.detach() if cut else hidden
        loss = F.cross_entropy(head(hidden), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
run(torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1), False)
run(torch.optim.SGD(head.parameters(), lr=0.1), True)
"""
    examination, _ = look(tmp_path, source)
    assert not serious(examination), examination.findings
