"""Class 21: a learning rate of 0 that is 0 only at first."""

import pytest
import torch
from torch import nn

from gradient_doctor import Doctor
from gradient_doctor.findings import Severity


def train(factors, steps, **options):
    """One group per function of the step; the scheduler is asked after each step."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in factors))
    sgd = torch.optim.SGD([{"params": layer.parameters(), "lr": 0.1} for layer in net])
    scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, factors)
    with Doctor({"net": net}, {"sgd": sgd}, **options) as doctor:
        for _ in range(steps):
            sgd.zero_grad()
            net(torch.randn(4, 3)).square().mean().backward()
            sgd.step()
            scheduler.step()
            doctor.step()
    return doctor


def graver(doctor):
    return [f for f in doctor.findings if f.severity >= Severity.WARNING]


def always(step):
    return 1.0


def never(step):
    return 0.0


def after(start):
    return lambda step: float(step >= start)


@pytest.mark.parametrize("mode", ["auto", "light"])
@pytest.mark.parametrize("steps", [12, 60])
def test_a_rate_that_rises_later_is_taken_back(steps, mode):
    doctor = train([after(10), always], steps, mode=mode)
    assert not graver(doctor), doctor.report()
    (note,) = doctor.findings
    assert note.number == 21
    assert note.what == "2 parameters had a learning rate of 0 before step 10, and not since."


def test_it_is_said_until_then():
    (finding,) = graver(train([after(10), always], 10))
    assert (finding.number, finding.severity) == (21, Severity.WARNING)
    assert finding.parameters == ("net.0.weight", "net.0.bias")


@pytest.mark.parametrize("steps", [12, 60, 160])
def test_of_two_groups_the_one_that_stays_at_zero_is_told(steps):
    (finding,) = graver(train([after(10), never, always], steps))
    assert (finding.number, finding.severity) == (21, Severity.WARNING)
    assert finding.parameters == ("net.1.weight", "net.1.bias")


def test_a_whole_optimizer_that_wakes_up():
    assert not graver(train([after(10)], 60))
    (finding,) = graver(train([never], 60))
    assert finding.severity is Severity.ERROR
