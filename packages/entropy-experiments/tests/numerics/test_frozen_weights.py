"""Forward mode past frozen weights: torch's own numbers to the last bit, for less work."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from entropy_experiments.models import functional_model
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics import forward_mode
from entropy_experiments.numerics.derivatives import pullback, pushforward, pushforwards
from oracles.tiny_models import tiny_lora, tiny_model, tiny_rollouts

pytestmark = pytest.mark.naive

MODELS = {
    "lora": lambda: tiny_lora("llama"),
    "lora with biases": lambda: tiny_lora("qwen2"),
    "dora": lambda: tiny_lora("llama", use_dora=True),
    "adapted head": lambda: tiny_lora("llama", target_modules=["q_proj", "lm_head"]),
    "all weights": lambda: tiny_model("llama"),
}


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    monkeypatch.setattr(forward_mode, "WORTHWHILE", 0)


def _slopes(model: Any, directions: int) -> tuple[list[torch.Tensor], int]:
    """Scores, their slopes along so many directions, and the operations that took."""
    policy, rollouts = SequenceProcessor(model), tiny_rollouts(prompts=(3, 40), responses=(9, 5))
    generator = torch.Generator().manual_seed(3)
    many = [
        {
            n: torch.randn(p.shape, generator=generator, dtype=p.dtype)
            for n, p in policy.params.items()
        }
        for _ in range(directions)
    ]
    counter = FlopCounterMode(display=False)
    with counter:
        here, slopes = pushforwards(
            lambda params: policy.score(params, rollouts), policy.params, many
        )
    return [x for scores in (here, *slopes) for x in scores], counter.get_total_flops()


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers_for_less(name, directions, monkeypatch):
    model = MODELS[name]()
    found, less = _slopes(model, directions)
    monkeypatch.setattr(functional_model, "frozen_weights", nullcontext)
    expected, more = _slopes(model, directions)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert any(x.abs().max() > 0 for x in found[2:])
    if name == "all weights":
        assert less == more  # nothing is frozen
        return
    with torch.no_grad(), FlopCounterMode(display=False) as plain:
        policy = SequenceProcessor(model)
        policy.score(policy.params, tiny_rollouts(prompts=(3, 40), responses=(9, 5)))
    # The products by zeros are about one plain pass, however many directions there are.
    assert more - less > 0.3 * plain.get_total_flops() / 2  # the policy checks itself once, too


def test_backward_is_not_touched(monkeypatch):
    policy, rollouts = SequenceProcessor(tiny_lora()), tiny_rollouts()

    def total(params: Any) -> torch.Tensor:
        return policy.score(params, rollouts).entropy_NS.sum()

    value, gradient = pullback(total, policy.params)
    monkeypatch.setattr(functional_model, "frozen_weights", nullcontext)
    expected, others = pullback(total, policy.params)
    assert torch.equal(value, expected)
    for name, g in gradient.items():
        assert torch.equal(g, others[name]), name


def test_second_order_by_reverse_mode_is_not_touched():
    """Both modes agree, so neither lost a term."""
    policy, rollouts = SequenceProcessor(tiny_lora()), tiny_rollouts()
    v = {name: torch.ones_like(p) for name, p in policy.params.items()}

    def total(params: Any) -> torch.Tensor:
        return policy.score(params, rollouts).entropy_NS.sum()

    _, forward = pushforward(total, policy.params, v)
    _, reverse = pushforward(total, policy.params, v, how="double_backward")
    assert float(forward) == pytest.approx(float(reverse), rel=1e-4)
    assert float(forward) != 0
