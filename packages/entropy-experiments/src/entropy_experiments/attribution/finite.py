"""Measured changes along many directions: the check on the matrix, direction by direction.

    F_ij(eta) = w_i [ A_i(eta) - H B_i(eta) - A_i(0) + H B_i(0) ] / sum_m w_m B_m(eta)

with A_i, B_i of `estimate.ratio` at theta + eta v_j and H the entropy at theta. Over i this sums to
the measured change H(eta) - H, and its slope at 0 is column j of the matrix entry by entry; at the
step's own eta the difference is curvature. (`integrand_N` of `estimate.measured` has the same sum,
but puts the change of the common denominator on each rollout's whole share: another split.)

The base pass is shared by all (`estimate.several_directions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite

from torch import Tensor

from entropy_experiments.estimate.measured import change, coarse_weights, coarsest_dtype
from entropy_experiments.estimate.ratio import (
    check_estimand,
    check_repeatable,
    drawn_with,
    payload,
    ratio_sums,
    score_all,
)
from entropy_experiments.estimate.several_directions import Key, moved_scores
from entropy_experiments.numerics.derivatives import require_full_precision
from entropy_experiments.numerics.sums import whole
from entropy_experiments.types import (
    Estimand,
    Estimate,
    Params,
    Policy,
    Rollouts,
    Scores,
    check_params,
)


def finite_columns(
    policy: Policy,
    evaluation: Rollouts,
    directions: Mapping[Key, Params],
    etas: Iterable[float],
    *,
    estimand: Estimand,
    microbatch: int = 8,
    grad_chunk: int | None = None,
    clip: float | None = None,
    base: Scores | None = None,
    noise_floor: float | None = None,
) -> dict[tuple[Key, float], Estimate]:
    """H(theta + eta v) - H(theta) for every direction and eta, as `measured` gives it.

    `diagnostics["contribution_N"]` has F of the module docstring, besides all that `measured`
    says. `grad_chunk` parameter settings are in memory at a time; None: one.
    """
    steps = [float(eta) for eta in etas]
    if not steps or not all(isfinite(eta) for eta in steps):
        raise ValueError(f"etas is {steps}; expected one or more finite numbers.")
    if grad_chunk is not None and grad_chunk < 1:
        raise ValueError(f"grad_chunk is {grad_chunk}; expected at least 1.")
    check_estimand(policy, estimand)
    if evaluation.behaviour_logprob_NS is not None and policy.top_p < 1:
        raise ValueError(
            "Rollouts with behaviour_logprob_NS under top_p < 1: their support may differ from "
            "the policy's, and no weight repairs that. Draw them from the policy itself."
        )
    for key, v in directions.items():
        check_params(f"direction {key!r}", v, policy.params)
    whole(evaluation)
    require_full_precision(policy.params)
    check_repeatable(policy, evaluation)
    base = base or score_all(policy, policy.params, evaluation, microbatch=microbatch)
    out: dict[tuple[Key, float], Estimate] = {}
    along = {key: partial(directions.__getitem__, key) for key in directions}
    doubt, dtype = coarse_weights(policy), coarsest_dtype(policy)
    for key, eta, moved, rounding in moved_scores(
        policy, evaluation, along, steps, base=base, microbatch=microbatch, chunk=grad_chunk or 1
    ):
        estimate = change(
            base,
            moved,
            evaluation,
            estimand,
            clip=clip,
            noise_floor=noise_floor,
            step_rounding=rounding,
            computed_in=dtype,
        )
        share_N = contributions(base, moved, evaluation, estimand, clip=clip)
        diagnostics = {**estimate.diagnostics, "contribution_N": share_N}
        estimate = replace(estimate, diagnostics=diagnostics)
        out[key, eta] = estimate.doubted(doubt) if doubt else estimate
    return out


def contributions(
    base: Scores,
    moved: Scores,
    rollouts: Rollouts,
    estimand: Estimand,
    *,
    clip: float | None = None,
) -> Tensor:
    """F_i of the module docstring, from scores at two parameters."""
    drawn_NS, weight_N = drawn_with(base, rollouts), rollouts.weight_N
    (top_N, bottom_N), (new_top_N, new_N) = (
        ratio_sums(
            payload(scores, estimand), scores.logprob_NS - drawn_NS, rollouts, estimand, clip=clip
        )
        for scores in (base, moved)
    )
    level = (weight_N * top_N).sum() / (weight_N * bottom_N).sum()
    shift_N = (new_top_N - level * new_N) - (top_N - level * bottom_N)
    return weight_N * shift_N / (weight_N * new_N).sum()
