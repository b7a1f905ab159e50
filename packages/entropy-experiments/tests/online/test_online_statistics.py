"""Fifty training steps of a Markov policy, probed with fresh rollouts: the truth is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entropy_experiments.online.evaluation_rollouts import Fresh
from entropy_experiments.online.probe import OnlineProbe, StepMeasurement
from oracles.markov import MarkovPolicy

pytestmark = pytest.mark.statistical

STEPS = 50


def _train(prompts: int, *, seed: int = 0) -> list[tuple[StepMeasurement, float]]:
    """Each step with the exact change it made. The gradient lowers entropy, with noise."""
    policy: Any = MarkovPolicy.random(seed)
    table = policy.params["table"].requires_grad_()
    optimizer = torch.optim.AdamW([table], lr=0.01)
    generator = torch.Generator().manual_seed(seed)
    detached = MarkovPolicy({"table": table.detach()}, policy.horizon)
    probe = OnlineProbe(
        detached, Fresh(lambda _: detached.draw(prompts, 1, generator)), microbatch=64, parts=False
    )
    out = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        policy.exact_entropy({"table": table}).backward()
        assert table.grad is not None
        noise = torch.randn(table.shape, generator=generator, dtype=table.dtype)
        table.grad += 0.5 * table.grad.std() * noise
        before = float(detached.exact_entropy())
        probe.before_step({"table": table.grad}, optimizer)
        optimizer.step()
        out.append((probe.after_step(), float(detached.exact_entropy()) - before))
    return out


def test_fifty_steps_are_covered_narrow_and_of_the_right_sign():
    steps = _train(192)
    covered = sum(found.change.covers(truth) for found, truth in steps)
    assert covered >= 44
    predicted = sum(found.prediction.change.covers(truth) for found, truth in steps)
    assert predicted >= 40  # of the change, of which it sees the linear part only
    widths = torch.tensor(
        [
            (found.change.interval[1] - found.change.interval[0]) / 2 / abs(truth)
            for found, truth in steps
            if found.change.interval is not None
        ]
    )
    assert len(widths) == STEPS
    assert float(widths.median()) <= 0.5
    clear = [
        (found.change.value, truth)
        for found, truth in steps
        if found.change.stderr is not None and abs(found.change.value) > 2 * found.change.stderr
    ]
    assert len(clear) >= STEPS // 2  # or the next line would say little
    assert sum(value * truth > 0 for value, truth in clear) >= 0.95 * len(clear)
