"""pass@k against every choice of k responses and every outcome; error bars against `by_prompt`."""

import itertools
from math import comb

import pytest
import torch

from entropy_experiments.estimate.shares import (
    NO_SPREAD,
    honest,
    pass_at_k,
    ratio_by_prompt,
    share_by_prompt,
    wilson,
)
from entropy_experiments.numerics.sums import by_prompt
from entropy_experiments.types import Estimand
from oracles.tiny_models import tiny_rollouts
from tolerances import EXACT, INVARIANT, assert_exact

pytestmark = pytest.mark.exact

REWARD = Estimand(quantity="reward", unit="sequence")


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_pass(samples):
    for passed in range(samples + 1):
        outcomes = [i < passed for i in range(samples)]
        for k in range(1, samples + 1):
            chosen = [any(some) for some in itertools.combinations(outcomes, k)]
            (found,) = pass_at_k([passed], samples, k).tolist()
            assert_exact(found, sum(chosen) / len(chosen))


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_pass_at_k_is_unbiased_and_the_plug_in_is_not(p):
    samples, k = 8, 4
    chance = [comb(samples, c) * p**c * (1 - p) ** (samples - c) for c in range(samples + 1)]
    truth = 1 - (1 - p) ** k
    ours = pass_at_k(range(samples + 1), samples, k).tolist()
    plug_in = [1 - (1 - c / samples) ** k for c in range(samples + 1)]
    assert_exact(sum(w * x for w, x in zip(chance, ours)), truth)
    assert abs(sum(w * x for w, x in zip(chance, plug_in)) - truth) > 1e-3 * truth


def test_many_samples_do_not_overflow():
    (found,) = pass_at_k([1], 10_000, 5_000).tolist()
    assert_exact(found, 0.5)


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="k is 9 with 8 responses per prompt; expected 1 to 8"):
        pass_at_k([1], 8, 9)
    with pytest.raises(ValueError, match="0 to 9 passes among 8 responses"):
        pass_at_k([0, 9], 8, 2)


def test_a_ratio_is_what_by_prompt_says():
    rollouts = tiny_rollouts(seed=3)
    prompts, samples = rollouts.prompt_N.unique(), 0
    generator = torch.Generator().manual_seed(0)
    top_N = torch.rand(len(rollouts), dtype=torch.float64, generator=generator)
    bottom_N = 1 + torch.rand(len(rollouts), dtype=torch.float64, generator=generator)
    samples = len(rollouts) // len(prompts)
    assert samples * len(prompts) == len(rollouts)
    expected = by_prompt(
        lambda a, b: a / b, torch.stack([top_N, bottom_N], 1), rollouts, Estimand()
    )

    def total(x_N):
        return torch.stack([x_N[rollouts.prompt_N == p].sum() for p in prompts])

    found = ratio_by_prompt(total(top_N), total(bottom_N), Estimand())
    assert_exact(found.value, expected.value)
    assert found.stderr == pytest.approx(expected.stderr, rel=EXACT)
    assert (found.interval is None) == (expected.interval is None)


def test_differences_are_paired():
    x = torch.tensor([0.1, 0.9, 0.4, 0.6, 0.2, 0.8], dtype=torch.float64)
    one, other = (share_by_prompt(value, REWARD, trials=48) for value in (x, x + 0.05))
    change = other - one
    assert_exact(change.value, 0.05)
    assert change.stderr < INVARIANT < one.stderr
    same = honest(one - one)
    assert same.interval is None
    assert NO_SPREAD in same.why_not


def test_no_share_is_certain():
    none, all_ = (share_by_prompt(torch.full((64,), x), REWARD, trials=512) for x in (0.0, 1.0))
    assert none.interval[0] == 0
    assert 0.03 < none.interval[1] < 0.08  # like 0 of 64, however many responses each
    assert all_.interval == pytest.approx((1 - none.interval[1], 1.0))
    assert none.trusted
    equal = share_by_prompt(torch.full((64,), 0.5), REWARD, trials=512)
    assert equal.interval[0] < 0.47
    assert equal.interval[1] > 0.53


def test_ends_stay_inside_and_few_prompts_have_none():
    low, high = wilson(0.99, 0.2, prompts=6, trials=48, free=5)
    assert 0 <= low < 0.99 < high <= 1
    few = share_by_prompt(torch.tensor([0.0, 1.0, 0.5]), REWARD, trials=24)
    assert few.interval is None
    assert "needs at least 5" in few.why_not[0]
    assert ratio_by_prompt(torch.ones(1), torch.ones(1), REWARD).interval is None
