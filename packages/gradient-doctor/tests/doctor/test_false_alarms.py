"""Right programs that were once called wrong; beside each, the fault that must still be found."""

import pytest
import torch
from torch import nn

from doctor.snippets import look, nothing, serious
from gradient_doctor import Doctor, Finding, Severity
from gradient_doctor.command import main
from gradient_doctor.detectors.places import called
from gradient_doctor.findings import add_note
from gradient_doctor.python_numbers import Numbers
from gradient_doctor.taint import Taint


def numbers_of(examination):
    return [f.number for f in serious(examination)]


# class 4: frozen for a part of each step

GAN = """
G = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
D = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
of_G, of_D = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
def judge(fake):
    return F.softplus(-D(torch.randn(8, 4))).mean() + F.softplus(D(fake.detach())).mean()
"""
TOGGLED = {
    "steps-in-turn": """
for step in range(6):
    fake = G(torch.randn(8, 3))
    D.requires_grad_(True)
    of_D.zero_grad()
    judge(fake).backward()
    of_D.step()
    D.requires_grad_(False)
    of_G.zero_grad()
    F.softplus(-D(fake)).mean().backward()
    of_G.step()
""",
    "steps-together": """
for step in range(6):
    fake = G(torch.randn(8, 3))
    of_D.zero_grad()
    of_G.zero_grad()
    D.requires_grad_(True)
    judge(fake).backward()
    D.requires_grad_(False)
    F.softplus(-D(fake)).mean().backward()
    of_D.step()
    of_G.step()
""",
    "generator-in-every-fifth": """
for step in range(12):
    G.requires_grad_(False)
    of_D.zero_grad()
    judge(G(torch.randn(8, 3))).backward()
    of_D.step()
    if step % 5 == 4:
        G.requires_grad_(True)
        of_G.zero_grad()
        F.softplus(-D(G(torch.randn(8, 3)))).mean().backward()
        of_G.step()
        G.requires_grad_(False)
""",
}


@pytest.mark.parametrize("mode", ["auto", "trace", "light"])
@pytest.mark.parametrize("name", TOGGLED)
def test_what_is_frozen_for_a_part_of_a_step_is_not_frozen(tmp_path, name, mode):
    nothing(tmp_path, GAN + TOGGLED[name], mode=mode)


@pytest.mark.parametrize("mode", ["auto", "trace"])
@pytest.mark.parametrize("name", TOGGLED)
def test_the_contract_knows_it_too(tmp_path, name, mode):
    nothing(tmp_path, GAN + TOGGLED[name], mode=mode, contract={"trainable": ["D.*", "G.*"]})


def test_what_is_not_thawed_again_is_frozen(tmp_path):
    source = GAN + TOGGLED["steps-in-turn"].replace("    D.requires_grad_(True)\n", "")
    source = source.replace(
        "    judge(fake).backward()\n", "    if step == 0: judge(fake).backward()\n"
    )
    examination, _ = look(tmp_path, source)
    assert 4 in numbers_of(examination)
    (finding,) = [f for f in examination.findings if f.number == 4]
    assert finding.what == "The optimizer of_D holds only frozen parameters."
    assert {name.split(".")[0] for name in finding.parameters} == {"D"}


# classes 4 and 5: what joins after the traced steps


def run(step, modules, optimizers, steps, **options):
    with Doctor(modules=modules, optimizers=optimizers, **options) as doctor:
        for number in range(steps):
            step(number)
            doctor.step()
    return doctor


def body_and_head(head):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
    return body, optimizer


def late_head(steps, joins, **options):
    """An auxiliary head of two branches; `joins` gives what the loss adds at a step."""
    head = nn.Module()  # no ModuleDict: its members might take turns
    head.a, head.b = nn.Linear(2, 1), nn.Linear(2, 1)
    body, optimizer = body_and_head(head)

    def step(number):
        hidden = body(torch.randn(8, 4))
        loss = hidden.square().mean()
        for name in joins(number):
            loss = loss + (getattr(head, name)(hidden) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return run(step, {"body": body, "head": head}, {"adam": optimizer}, steps, **options)


def graver(doctor):
    return [f for f in doctor.findings if f.severity >= Severity.WARNING]


@pytest.mark.parametrize("mode", ["auto", "light"])
@pytest.mark.parametrize("steps", [12, 60])
def test_a_loss_that_joins_late_is_taken_back(steps, mode):
    doctor = late_head(steps, lambda number: "ab" if number >= 10 else "", mode=mode)
    assert not graver(doctor), doctor.report()
    (note,) = [f for f in doctor.findings if f.number == 5]
    assert note.what == "4 parameters had no gradient before step 10, and have one since."
    assert "head is trainable and in an optimizer" in note.why


@pytest.mark.parametrize("mode", ["auto", "light"])
def test_it_is_said_until_then(mode):
    doctor = late_head(10, lambda number: "ab" if number >= 10 else "", mode=mode)
    assert [f.number for f in graver(doctor)] == [5], doctor.report()


@pytest.mark.parametrize("steps", [12, 60])
def test_of_two_branches_the_one_that_stays_away_is_told(steps):
    doctor = late_head(steps, lambda number: "a" if number >= 10 else "")
    (finding,) = graver(doctor)
    assert (finding.number, finding.parameters) == (5, ("head.b.weight", "head.b.bias"))
    assert "head.b is trainable" in finding.what


def test_a_region_without_gradients_that_ends_later_is_taken_back():
    """A warm-up of the head alone: then the body learns as well."""
    head = nn.Linear(2, 1)
    body, optimizer = body_and_head(head)

    def step(number, until=8):
        with torch.set_grad_enabled(number >= until):
            hidden = body(torch.randn(8, 4))
        optimizer.zero_grad()
        (head(hidden) - 1).square().mean().backward()
        optimizer.step()

    doctor = run(step, {"body": body, "head": head}, {"adam": optimizer}, 12)
    assert not graver(doctor), doctor.report()
    doctor = run(lambda n: step(n, until=99), {"body": body, "head": head}, {"adam": optimizer}, 12)
    assert [f.number for f in graver(doctor)] == [2]


def unfrozen(steps, when, reached=True, after=False, apart=False, **options):
    head = nn.Linear(2, 1)
    body, optimizer = body_and_head(head)
    optimizers = {"adam": optimizer}
    if apart:
        optimizers = {
            "slow": torch.optim.Adam(body.parameters(), 1e-4),
            "fast": torch.optim.Adam(head.parameters()),
        }
    body.requires_grad_(False)

    def step(number):
        if number == when and not after:
            body.requires_grad_(True)
        hidden = body(torch.randn(8, 4)) if reached else torch.randn(8, 2)
        for one in optimizers.values():
            one.zero_grad()
        (head(hidden) - 1).square().mean().backward()
        for one in optimizers.values():
            one.step()
        if number == when and after:
            body.requires_grad_(True)

    return run(step, {"body": body, "head": head}, optimizers, steps, **options)


@pytest.mark.parametrize("mode", ["auto", "light"])
@pytest.mark.parametrize("after", [False, True], ids=["before-its-step", "after-its-step"])
@pytest.mark.parametrize(("when", "steps"), [(2, 12), (4, 5), (4, 12), (4, 60)])
def test_gradual_unfreezing_is_no_fault(when, steps, after, mode):
    doctor = unfrozen(steps, when, after=after, mode=mode)
    assert not graver(doctor), doctor.report()


@pytest.mark.parametrize("mode", ["auto", "light"])
def test_an_optimizer_whose_parameters_are_thawed_later_is_no_fault(mode):
    doctor = unfrozen(12, 6, apart=True, mode=mode)
    assert not graver(doctor), doctor.report()
    assert [f.number for f in graver(unfrozen(6, 6, apart=True, mode=mode))] == [4]


@pytest.mark.parametrize("mode", ["auto", "light"])
def test_what_is_thawed_for_nothing_is_told(mode):
    """The step after the thaw is looked at, although its turn would come much later."""
    doctor = unfrozen(12, 5, reached=False, mode=mode)
    (finding,) = graver(doctor)
    assert finding.number == 5
    assert "body is trainable" in finding.what


# class 23: a constant of the program that equals a traced number

HALF = """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters())
for step in range(4):
    out = net(torch.randn(8, 4))
    half = float((out > out.sort(0).values[3]).float().mean())
    assert half == 0.5
    loss = {weight} * out.square().mean() + 0.5
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_constant_that_equals_a_logged_number_is_a_constant(tmp_path):
    nothing(tmp_path, HALF.format(weight="0.5"))


@pytest.mark.parametrize("term", ["half", "[half][0]", "max(half, 0.0)"])
def test_the_number_itself_is_still_followed(tmp_path, term):
    source = HALF.format(weight="1.5").replace("+ 0.5", f"+ {term}")
    examination, _ = look(tmp_path, source)
    assert numbers_of(examination) == [23], "\n".join(map(str, examination.findings))


def test_numbers_are_known_as_objects_and_not_by_value():
    taint = Taint(1, 0, frozenset(), None, "__float__", 0)
    known, equal = float("0.25"), float("0.25")
    numbers = Numbers()
    numbers.keep(known, taint)
    assert numbers.known(known) is taint
    assert numbers.known(equal) is None
    numbers.clear()
    assert numbers.known(known) is None


# class 20 and others: parameters without elements


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_parameter_without_elements_has_nothing_to_learn(used, frozen):
    body, _ = body_and_head(nn.Identity())
    body.none = nn.Parameter(torch.zeros(0, 4), requires_grad=not frozen)
    optimizer = torch.optim.Adam(body.parameters())

    def step(number):
        optimizer.zero_grad()
        loss = body[2](torch.tanh(body[0](torch.randn(8, 4)))).square().mean()
        (loss + body.none.sum() if used else loss).backward()
        optimizer.step()

    doctor = run(step, {"body": body}, {"adam": optimizer}, 4, contract={"trainable": ["body.*"]})
    assert not doctor.findings, doctor.report()


# words

CRASH = """\
import torch
from torch import nn
net = nn.Linear(4, 1)
optimizer = torch.optim.Adam(net.parameters())
for step in range(3):
    loss = net(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    (loss.detach() if step == {at} else loss).backward()
    optimizer.step()
"""


def test_a_crash_is_explained_once_and_counted_right(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(CRASH.format(at=0))
    assert main([str(script)]) == 1
    told = capfd.readouterr().err
    assert told.count("takes the value out of the graph") == 1
    assert told.count("  fix:") == 1
    head, report = told.split("gradient_doctor: 1 error before the end of the first step.")
    assert "gradient_doctor: ERROR [1 constant-loss]" in head
    assert "ERROR [1 constant-loss]" in report
    assert f"where: {script}:8" in report
    assert "why, and how to mend it: see the error" in report


def test_a_later_crash_counts_the_steps_before_it(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(CRASH.format(at=1))
    assert main([str(script)]) == 1
    assert "gradient_doctor: 1 error in 1 step." in capfd.readouterr().err


def test_without_the_report_the_error_says_all(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(CRASH.format(at=0))
    assert main(["--quiet", str(script)]) == 1
    told = capfd.readouterr().err
    assert told.count("  fix:") == 1
    assert "see the error" not in told


def test_a_finding_that_grows_stands_once_on_its_error():
    error = RuntimeError("broken")
    small = Finding(13, Severity.ERROR, "Changed.", "Because.", "Do not.", parameters=("a",))
    grown = Finding(13, Severity.ERROR, "Changed.", "Because.", "Do not.", parameters=("a", "b"))
    add_note(error, small)
    add_note(error, small)
    assert error.__notes__ == [f"gradient_doctor: {small}"]
    add_note(error, grown, small)
    assert error.__notes__ == [f"gradient_doctor: {grown}"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optimizer", "optimizer"),
        ("of_actor", "optimizer of_actor"),
        ("actor_optimizer", "actor_optimizer"),
    ],
)
def test_an_optimizer_is_called_so_once(name, said):
    assert called(name) == said
