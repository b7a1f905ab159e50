"""Differences led by reverse mode.

A slope by differences has per-rollout terms, hence an error bar, and a bias that it cannot see: the
curve bends over the stencil, or the stencil crosses a switch of experts. Reverse mode has the exact
value and no terms. So a `central` slope has the value of reverse mode and the spread of the
differences; where the two values are further apart than a tenth of the error bar, and by more than
can be overlooked, it is not trusted: then the spread, too, is mostly that of the differences' own
mistakes (where a stencil crosses switches of experts, both grow with the rollouts' root).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from entropy_experiments.estimate.gradient import weighted_gradient
from entropy_experiments.numerics.derivatives import dot
from entropy_experiments.numerics.sums import Statistic
from entropy_experiments.types import Estimate, Params, Policy, Rollouts, Scores

SHARE = 0.1
"""Of half the interval."""
SLACK = 0.01
"""Of the value: less than this changes a spread by nothing that can be seen."""


def led_by_reverse(estimate: Estimate, differences: float, exact: float) -> Estimate:
    """`estimate`, moved by what its `differences` miss of the `exact` slope."""
    gap = exact - differences
    half = 0.0
    if estimate.interval is not None:
        half = (estimate.interval[1] - estimate.interval[0]) / 2
    reasons = estimate.given_reasons
    if abs(gap) > max(SHARE * half, SLACK * abs(exact)):
        reasons = (
            *reasons,
            f"differences give {differences:.4g}, reverse mode {exact:.4g} on the same rollouts: "
            "more than the error bar allows",
        )
    interval = estimate.interval and (estimate.interval[0] + gap, estimate.interval[1] + gap)
    return replace(estimate, value=estimate.value + gap, interval=interval, given_reasons=reasons)


def slope_by_reverse(
    policy: Policy,
    rollouts: Rollouts,
    v: Params,
    statistic: Statistic,
    sums_of: Callable[[Tensor], Tensor],
    *,
    microbatch: int,
) -> float:
    """A statistic that is linear in D_v S of every rollout: its exact value, by one gradient.

    `sums_of(slope_N)` are the statistic's columns.
    """
    slope_N = torch.zeros_like(rollouts.weight_N).requires_grad_()
    with torch.enable_grad():
        sums_NM = sums_of(slope_N)
        value = statistic(*(rollouts.weight_N[:, None] * sums_NM).sum(0))
    (cotangent_N,) = torch.autograd.grad(value, slope_N)
    cotangent_NS = torch.where(rollouts.response_NS, cotangent_N[:, None], 0.0)
    cotangent = Scores(cotangent_NS, torch.zeros_like(cotangent_NS))
    return dot(weighted_gradient(policy, rollouts, cotangent, microbatch=microbatch), v)
