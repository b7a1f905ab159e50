"""Gradients of half-precision parameters, cut over ranks: added in fp32 and rounded once.

Added in half precision they would be rounded with every rank; with three, that is visible. Those of
fp32 parameters are added in fp64 and not rounded by FSDP at all: bits of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from entropy_experiments.distributed import Ranks, across, local_part
from entropy_experiments.estimate.gradient import weighted_gradient
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.sharded import ShardedModel, ShardedPolicy, _reduction
from entropy_experiments.types import Scores
from oracles.processes import on_ranks
from oracles.tiny_models import tiny_lora, tiny_model, tiny_rollouts

pytestmark = pytest.mark.invariant

HALF = torch.bfloat16
SLACK = 1.001
"""For fp32's own roundings."""


def _half(dtype: torch.dtype = HALF) -> Any:
    return tiny_model("llama", num_hidden_layers=1).to(dtype)


def _gradient(policy: Any, rank: int) -> dict[str, Tensor]:
    """Of this rank's rollouts, for a loss whose weights differ from token to token."""
    params = {name: p.detach().requires_grad_() for name, p in policy.params.items()}
    scores = policy.score(params, tiny_rollouts(seed=rank))
    generator = torch.Generator().manual_seed(rank)
    weight_NS = torch.randn(scores.logprob_NS.shape, generator=generator)
    (scores.logprob_NS * weight_NS).sum().backward()
    return {name: p.grad for name, p in params.items() if p.grad is not None}


def _sharded() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(this rank's rows of the sum, the gradient of its own rollouts in one process)."""
    ranks = Ranks.all()
    own = _gradient(SequenceProcessor(_half()), ranks.rank)
    summed = _gradient(ShardedPolicy(ShardedModel(_half(), ranks)), ranks.rank)
    return {name: local_part(v).clone() for name, v in summed.items()}, own


def _excess(found: Tensor, exact: Tensor) -> float:
    """The largest error, in units of what one rounding may cost."""
    unit = (torch.finfo(HALF).eps / 2 * exact.abs()).clamp_min(torch.finfo(HALF).tiny)
    return float(((found.double() - exact).abs() / unit).max())


@pytest.mark.slow
def test_the_sum_over_ranks_is_rounded_once():
    everyone = on_ranks(3, _sharded)
    worst = naive = 0.0
    for name in everyone[0][1]:
        each = [own[name] for _, own in everyone]
        found = torch.cat([rows[name] for rows, _ in everyone])
        assert found.dtype == HALF
        exact = torch.stack([g.double() for g in each]).sum(0)
        worst = max(worst, _excess(found, exact))
        naive = max(naive, _excess(each[0] + each[1] + each[2], exact))
    assert worst <= SLACK
    assert naive > 2  # the bound has teeth


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float64, torch.float64),
    ],
)
def test_sums_are_wider_than_the_parameters(dtype, expected):
    assert _reduction(_half(dtype)).reduce_dtype == expected


def _fp32() -> dict[str, Tensor]:
    """Whole gradients of five rollouts in microbatches of two: one rank idles."""
    ranks = Ranks.all()
    with across(ranks):
        policy = ShardedPolicy(ShardedModel(_half(torch.float32), ranks))
        shards: dict[str, Any] = _microbatched(policy)
        return {name: shard.full_tensor() for name, shard in shards.items()}


def _microbatched(policy: Any) -> dict[str, Tensor]:
    rollouts = tiny_rollouts(prompts=(3, 9, 5, 4, 4), responses=(4, 7, 2, 3, 5))
    generator, shape = torch.Generator().manual_seed(7), rollouts.tokens_NS.shape
    weights = Scores(*(torch.randn(shape, generator=generator) for _ in range(2)))
    return weighted_gradient(policy, rollouts, weights, microbatch=2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_fp32_gradients_are_the_bits_of_one_process(size):
    expected = _microbatched(SequenceProcessor(_half(torch.float32)))
    for found in on_ranks(size, _fp32):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_trained_parameters_count_and_not_the_base():
    model = tiny_lora("llama").double()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    assert _reduction(model).reduce_dtype == torch.float64
    assert _reduction(_half(torch.float32)).param_dtype is None
