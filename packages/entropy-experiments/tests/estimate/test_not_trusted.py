"""Numbers that cannot be checked, or are known to be off, are not trusted, and say why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from entropy_experiments import Direction, analyze_step, entropy_level, measured
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


def test_a_number_that_every_prompt_gives_exactly():
    policy = BigramPolicy()
    policy.params = {"table": torch.zeros(5, 5, dtype=torch.float64)}
    level = entropy_level(policy, policy.draw(seed=2))
    assert level.interval == (level.value, level.value)
    assert "no spread can be seen" in level.why_not[0]


@pytest.mark.parametrize("prompts", [1, 2, 4, 5, 8])
def test_prompts_count_by_their_weight(prompts):
    policy = BigramPolicy()
    rollouts = policy.draw(seed=2)
    weight_N = torch.where(rollouts.prompt_N < prompts, 1.0, 1e-9).double()
    level = entropy_level(policy, replace(rollouts, weight_N=weight_N / weight_N.sum()))
    assert level.trusted == (prompts >= 5)
    if prompts < 5:
        assert f"8 prompts leave {prompts}.0 that count" in level.why_not[0]


def test_a_prompt_with_fewer_rollouts_is_still_a_prompt():
    policy = BigramPolicy()
    rollouts = policy.draw(seed=2, prompts=5)
    cut = rollouts.take(torch.arange(len(rollouts) - 2))
    assert entropy_level(policy, replace(cut, weight_N=None, share=1.0)).trusted


def test_the_update_batch_is_no_evaluation():
    policy = BigramPolicy()
    batch = policy.update_batch(seed=1)
    adamw = torch.optim.AdamW(policy.params.values(), lr=0.02)
    analysis = analyze_step(policy, adamw, batch, batch.rollouts)
    for estimate in (analysis.predicted, analysis.measured):
        assert "those of the update batch" in estimate.why_not[0]
    assert analyze_step(policy, adamw, batch, policy.draw(seed=2)).measured.trusted
