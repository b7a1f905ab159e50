"""Gradients that the program writes itself, without a backward."""

import pytest
import torch
from torch import nn

from doctor.snippets import look, loop, nothing, only
from gradient_doctor import Doctor
from gradient_doctor.findings import Severity


def train(write, steps, modes="auto"):
    """`write(model, step)` gives the model its gradients; a second model has a backward."""
    torch.manual_seed(0)
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizers = {
        "mine": torch.optim.SGD(model.parameters(), lr=0.1),
        "theirs": torch.optim.SGD(other.parameters(), lr=0.1),
    }
    with Doctor({"model": model, "other": other}, optimizers, mode=modes) as doctor:
        for step in range(steps):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            other(torch.randn(4, 3)).square().mean().backward()
            write(model, step)
            for optimizer in optimizers.values():
                optimizer.step()
            doctor.step()
    return doctor


def assigned(model, step):
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def added(model, step):
    """As Reptile does: a gradient of zeros that is filled."""
    with torch.no_grad():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            p.grad.add_(torch.randn_like(p))


def zeros(model, step):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def graver(doctor):
    return [f.number for f in doctor.findings if f.severity >= Severity.WARNING]


@pytest.mark.parametrize("mode", ["auto", "light", "trace"])
@pytest.mark.parametrize("write", [assigned, added])
def test_a_gradient_written_by_hand_is_one(write, mode):
    assert not graver(train(write, 6, mode))


@pytest.mark.parametrize("write", [zeros, lambda model, step: None])
def test_without_one_it_is_told(write):
    """Has teeth: a gradient of zeros that nobody filled is none."""
    assert graver(train(write, 6)) == [5]


@pytest.mark.parametrize("mode", ["auto", "light"])
def test_one_that_begins_later_takes_it_back(mode):
    late = lambda model, step: assigned(model, step) if step >= 7 else None  # noqa: E731
    assert graver(train(late, 7, mode)) == [5]
    doctor = train(late, 12, mode)
    assert not graver(doctor)
    assert "2 parameters had no gradient before step 7" in doctor.report()


def test_evolution_strategies_have_no_backward_at_all():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    adam = torch.optim.Adam(model.parameters())
    with Doctor({"model": model}, {"adam": adam}) as doctor:
        for _ in range(6):
            with torch.no_grad():
                loss = model(torch.randn(4, 3)).square().mean()
            for p in model.parameters():
                p.grad = loss * torch.randn_like(p)
            adam.step()
            doctor.step()
    assert not graver(doctor)


# loops that move their weights themselves

DESCENT = """
w = {make}
b = torch.zeros(1, requires_grad=True)
x = torch.randn(64, 5)
y = x @ torch.randn(5, 1)
for step in range({steps}):
    loss = ((x @ w + b - y) ** 2).mean()
    loss.backward()
    with torch.no_grad():
        for p in (w, b):
            if p.grad is not None:
                p -= 0.1 * p.grad
                p.grad.zero_()
"""
HIDDEN_LEAVES = {
    "view": "torch.randn(5, requires_grad=True).view(5, 1)  # FAULT",
    "cast": "torch.randn(5, 1, dtype=torch.float64, requires_grad=True).float()  # FAULT",
}


@pytest.mark.parametrize("make", HIDDEN_LEAVES.values(), ids=HIDDEN_LEAVES)
def test_a_weight_that_is_no_leaf(tmp_path, make):
    finding = only(tmp_path, DESCENT.format(make=make, steps=5), 7)
    assert "no leaf" in finding.what


@pytest.mark.parametrize(
    ("condition", "error"), [("True", TypeError), ("p.grad is not None", RuntimeError)]
)
def test_what_ends_the_program_is_explained(tmp_path, condition, error):
    """By the None itself, or because the graph that computed the weight is freed."""
    make = "torch.randn(5, 1, requires_grad=True) * 0.1  # FAULT"
    source = DESCENT.format(make=make, steps=5)
    examination, lines = look(tmp_path, source.replace("p.grad is not None", condition))
    (finding,) = [f for f in examination.findings if f.number == 7]
    assert (type(examination.error), finding.site.line) == (error, lines[0])


def test_weights_that_are_leaves(tmp_path):
    nothing(tmp_path, DESCENT.format(make="torch.randn(5, 1).requires_grad_()", steps=40))


def test_gradients_of_activations_may_be_looked_at(tmp_path):
    lines = ("h = body(x)", "loss = F.cross_entropy(head(h), y)", "kept = h.grad")
    nothing(tmp_path, loop(*lines))


def test_backwards_are_the_steps_of_a_loop_by_hand(tmp_path):
    """They are traced for a while, and not for ever."""
    source = DESCENT.format(make="torch.randn(5, 1).requires_grad_()", steps=40)
    examination, _ = look(tmp_path, source)
    assert examination.steps == 35


def test_micro_batches_of_one_step_are_one_step(tmp_path):
    source = """
net = nn.Linear(4, 3)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    sgd.zero_grad()
    for part in range(50):
        (F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,))) / 50).backward()
    sgd.step()
"""
    examination, _ = look(tmp_path, source)
    assert examination.steps == 3
    assert not examination.findings


ASCENT = """
weight = torch.randn(4, 1, requires_grad=True)
for step in range(15):
    x = torch.randn(64, 4)
    loss = (x @ weight - x[:, :1]).square().mean()
    loss.backward()
    with torch.no_grad():
        weight {sign}= 0.1 * weight.grad{mark}
        weight.grad.zero_()
"""


def test_a_loss_that_rises_along_its_own_gradient(tmp_path):
    finding = only(tmp_path, ASCENT.format(sign="+", mark="  # FAULT"), 32)
    assert "of 10 steps along its own gradient" in finding.what


def test_a_loss_that_falls(tmp_path):
    nothing(tmp_path, ASCENT.format(sign="-", mark=""))


def test_a_rising_loss_under_an_optimizer_is_a_note(tmp_path):
    source = loop("loss = 1.5**step * F.cross_entropy(head(body(x)), y)").replace(
        "range(4)", "range(14)"
    )
    examination, _ = look(tmp_path, source)
    assert [f.severity for f in examination.findings if f.number == 32] == [Severity.NOTE]
