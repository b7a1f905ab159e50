"""Gradients that the program writes itself, without a backward."""

import pytest
import torch
from torch import nn

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
