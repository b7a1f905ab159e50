"""Numbers that cannot be checked, or are known to be off, are not trusted, and say why."""

from __future__ import annotations

import pytest
import torch

from entropy_experiments import Direction, measured
from entropy_experiments.toy import BigramPolicy

pytestmark = pytest.mark.faults


def _toy(dtype):
    policy = BigramPolicy()
    policy.params = {"table": policy.params["table"].detach().to(dtype)}
    v = {"table": torch.eye(5, dtype=dtype)}
    return policy, policy.draw(seed=2), Direction(parts={"gradient": v}, lr=0.1)


def test_a_change_below_the_rounding_of_its_dtype():
    eta = 1.7e-6  # moves the entropy by 8e-8 nats
    single, double = (
        measured(*_toy(dtype), eta, repackings=0) for dtype in (torch.float32, torch.float64)
    )
    assert double.trusted
    assert abs(double.value) < 1.1e-7
    (reason,) = single.why_not
    assert "the rounding of the entropy in float32" in reason
    assert measured(*_toy(torch.float32), 1e-3, repackings=0).trusted


def test_a_step_of_no_size_at_all():
    change = measured(*_toy(torch.float64), 1e-200, repackings=0)
    assert change.interval == (0, 0)
    assert any("the rounding of the entropy in float64" in reason for reason in change.why_not)
