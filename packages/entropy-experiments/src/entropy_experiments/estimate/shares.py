"""Means and shares over prompts with several responses each: pass rates, pass@k, format.

    pass@k of a prompt with c passes among n responses = 1 - C(n - c, k) / C(n, k)

which is unbiased: the chance that k of the n responses, drawn without replacement, hold a pass.
(1 - (1 - c/n)^k is not.) Prompts are the clusters of every error bar.

A share near 0 or 1 has no use for a symmetric interval, and 0 of 64 would have one of width 0.
Shares have Wilson's, with Student's t and the number of independent trials that the spread over
prompts amounts to: n = p (1 - p) / stderr^2, at most as many as there were; where no prompt
differs from the others (p is 0 or 1), each prompt counts as one trial. The degrees of freedom are
fewer where a few prompts carry the spread (`types.estimate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import comb, sqrt

import torch
from scipy.special import stdtrit
from torch import Tensor

from entropy_experiments.types import Estimand, Estimate, Influence
from entropy_experiments.types.estimate import CONFIDENCE, NO_WIDTH

NO_SPREAD = "every prompt gave the same: there is no spread to make an interval of"


def pass_at_k(passed: Sequence[int], samples: int, k: int) -> Tensor:
    """[P] from the passes of each prompt among its `samples` responses."""
    if not 1 <= k <= samples:
        raise ValueError(
            f"k is {k} with {samples} responses per prompt; expected 1 to {samples}. Draw more "
            "responses (--samples), or lower k."
        )
    if not all(0 <= c <= samples for c in passed):
        raise ValueError(
            f"Got {min(passed)} to {max(passed)} passes among {samples} responses; expected 0 to "
            f"{samples}."
        )
    ways = comb(samples, k)
    return torch.tensor([1 - comb(samples - c, k) / ways for c in passed], dtype=torch.float64)


def ratio_by_prompt(top_P: Tensor, bottom_P: Tensor, estimand: Estimand) -> Estimate:
    """sum(top) / sum(bottom), each prompt weighing the same; jackknife over prompts."""
    top_P, bottom_P = top_P.double(), bottom_P.double()
    prompts = len(top_P)
    top, bottom = top_P.sum(), bottom_P.sum()
    value = top / bottom
    # One prompt has no leave-one-out; `Estimate.build` gives no interval then.
    without_P = value.expand(1) if prompts == 1 else (top - top_P) / (bottom - bottom_P)
    influence = Influence(
        value_C=(1 - 1 / prompts) * (value - without_P),
        prompt_C=torch.arange(prompts),
        stratum_C=torch.zeros(prompts, dtype=torch.int64),
        sample="evaluation",
    )
    return honest(Estimate.build(value=float(value), estimand=estimand, influences=(influence,)))


def honest(estimate: Estimate) -> Estimate:
    """Without the interval of width 0 that equal prompts would have."""
    if estimate.interval is None or estimate.stderr:
        return estimate
    others = [reason for reason in estimate.own_reasons if reason != NO_WIDTH]
    return replace(estimate, interval=None, own_reasons=(*others, NO_SPREAD))


def share_by_prompt(share_P: Tensor, estimand: Estimand, *, trials: float) -> Estimate:
    """The mean of numbers in [0, 1], one per prompt; `trials`: independent ones, at most."""
    estimate = ratio_by_prompt(share_P, torch.ones_like(share_P), estimand)
    prompts = len(share_P)
    if estimate.interval is None and NO_SPREAD not in estimate.own_reasons:
        return estimate  # too few prompts
    assert estimate.stderr is not None
    spread = estimate.influences[0].variance()
    assert spread is not None  # at least MIN_PROMPTS
    bar = wilson(estimate.value, estimate.stderr, prompts=prompts, trials=trials, free=spread[1])
    reasons = tuple(reason for reason in estimate.own_reasons if reason != NO_SPREAD)
    return replace(estimate, interval=bar, own_reasons=reasons)


def wilson(
    p: float, stderr: float, *, prompts: int, trials: float, free: float
) -> tuple[float, float]:
    """Both ends lie in [0, 1], and they are never the same. `free`: degrees of freedom of t."""
    inside = p * (1 - p)
    if inside <= 0:
        n = float(prompts)
    else:
        n = trials if stderr == 0 else min(trials, inside / stderr**2)
    t2 = float(stdtrit(free, 0.5 + CONFIDENCE / 2)) ** 2
    centre = (p + t2 / (2 * n)) / (1 + t2 / n)
    half = sqrt(t2 * (max(inside, 0.0) / n + t2 / (4 * n * n))) / (1 + t2 / n)
    return (0.0 if p <= 0 else max(0.0, centre - half)), (
        1.0 if p >= 1 else min(1.0, centre + half)
    )
