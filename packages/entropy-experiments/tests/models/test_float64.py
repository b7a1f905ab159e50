"""fp64 that is fp64 throughout: exact slopes of transformers models against differences."""

from __future__ import annotations

import pytest
import torch

from entropy_experiments.models.precision import low_precision_operations, true_float64
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import pushforward
from oracles.tiny_models import tiny_lora, tiny_model, tiny_rollouts
from tolerances import INVARIANT, SLOPES_FP64

pytestmark = pytest.mark.exact

MODELS = {
    "qwen2": lambda: tiny_model("qwen2"),
    "qwen3": lambda: tiny_model("qwen3"),
    "llama": lambda: tiny_model("llama"),
    "gpt2": lambda: tiny_model("gpt2"),
    "granite": lambda: tiny_model("granite"),
    "lora": lambda: tiny_lora("qwen2"),
    "dora": lambda: tiny_lora("qwen2", use_dora=True),
}


def gap(model) -> float:
    """Exact slope of every entropy against central differences, relative."""
    policy = SequenceProcessor(model)
    rollouts = tiny_rollouts(prompts=(3, 40, 7), responses=(5, 9, 2))
    generator = torch.Generator().manual_seed(3)
    v = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in policy.params.items()
    }

    def entropies(params):
        return policy.score(params, rollouts).entropy_NS

    _, exact_NS = pushforward(entropies, policy.params, v)
    _, central_NS = pushforward(entropies, policy.params, v, how="central")
    return float((exact_NS - central_NS).norm() / exact_NS.norm())


@pytest.mark.parametrize("name", MODELS)
def test_slopes_are_exact(name):
    assert gap(true_float64(MODELS[name]())) <= SLOPES_FP64


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_plain_double_is_not_enough(name):
    """The test above has teeth: fp32 inside the norms is seen, also by the watch itself."""
    model = MODELS[name]().double()
    assert gap(model) > 100 * SLOPES_FP64
    assert low_precision_operations(model)


@pytest.mark.parametrize("name", ["qwen2", "llama", "dora"])
def test_batches_are_one_at_a_time(name):
    policy = SequenceProcessor(true_float64(MODELS[name]()))
    rollouts = tiny_rollouts(prompts=(3, 40, 7), responses=(5, 9, 2))
    together = policy.score(policy.params, rollouts)
    for rows_N, columns, part in rollouts.split(1):
        for one_NS, all_NS in zip(policy.score(policy.params, part), together, strict=True):
            assert one_NS.dtype == torch.float64
            assert float((one_NS - all_NS[rows_N, columns]).abs().max()) <= INVARIANT


@pytest.mark.parametrize("name", ["qwen2", "llama", "granite"])
def test_it_is_the_same_model_only_sharper(name):
    rollouts = tiny_rollouts()
    plain, sharp = (SequenceProcessor(m) for m in (MODELS[name](), true_float64(MODELS[name]())))
    here, there = (p.score(p.params, rollouts).entropy_NS for p in (plain, sharp))
    assert 0 < float((here - there).abs().max()) < 1e-4


def test_an_unknown_architecture_is_refused_by_name():
    with pytest.raises(ValueError, match=r"not known for architecture 'gemma2'.*qwen2"):
        true_float64(tiny_model("gemma2"))
    eager = tiny_model("qwen2")
    eager.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"needs attn_implementation='sdpa'; got 'eager'"):
        true_float64(eager)
