"""Second order: how soon the straight line fails.

With A = sum W H and B = sum W T along theta + e v,

    H'' = A''/B - 2 A'B'/B^2 - A B''/B^2 + 2 A B'^2/B^3

The denominator moves too: an update that lengthens responses bends the entropy per token even
where every state keeps its own. Linear range: |eta H'' / 2| <= 10 % of |H'|.

The second derivatives are differences over a few learning rates (`numerics.second_order`), taken at
two widths: where these disagree, nothing here is trusted (`estimate.stencil`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from torch import Tensor

from entropy_experiments.distributed import current
from entropy_experiments.estimate.central import led_by_reverse
from entropy_experiments.estimate.gradient import entropy_gradient
from entropy_experiments.estimate.modes import used_forward_mode
from entropy_experiments.estimate.noise import spread
from entropy_experiments.estimate.options import EstimatorOptions, SlopeKeywords, slope_options
from entropy_experiments.estimate.ratio import (
    check_repeatable,
    check_scores,
    drawn_with,
    payload,
    ratio_sums,
    score_all,
    stale_reasons,
)
from entropy_experiments.estimate.stencil import (
    COLUMNS,
    curvature_of_ratio,
    direction_step,
    doubted,
    stencil_columns,
    stencil_of,
)
from entropy_experiments.numerics.derivatives import How, dot
from entropy_experiments.numerics.second_order import SecondOrder, pushforward2
from entropy_experiments.numerics.sums import by_prompt, point, whole
from entropy_experiments.types import (
    Direction,
    Estimand,
    Estimate,
    Policy,
    Rollouts,
    Scores,
    check_direction,
)

LINEAR_TOLERANCE = 0.1


def curvature(
    policy: Policy,
    rollouts: Rollouts,
    direction: Direction,
    options: EstimatorOptions | None = None,
    *,
    width: float | None = None,
    **keywords: Unpack[SlopeKeywords],
) -> Estimate:
    """D_v D_v H: a step of eta bends away from its prediction by eta^2 / 2 times this.

    Args:
        policy: Parameters at which the slope is taken.
        rollouts: Drawn from this policy (or with `behaviour_logprob_NS`).
        direction: Along which the parameters move.
        options: What entropy is meant, and how it is computed; None: the defaults.
        width: Of the differences, in learning rates of the direction; None: a few, as rounding
            allows.
        keywords: Fields of `options`, which win over them; `form` is a slope's: "to_go", the
            derivative of the per_decision measurement, or "matched", of snis.

    Returns:
        The curvature. Its diagnostics hold `slope` (an Estimate from the same pass), `linear_range`
        (the eta up to which the bend is within 10 % of the slope), `linear_range_low`, the same at
        the curvature's unfavourable interval end with the noise floor added, and `stencil`, the
        value at two widths.

    Raises:
        ValueError: If the policy has top_p below 1: differences would step over changes of the
            support.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> rollouts = policy.draw(seed=2)
        >>> direction = Direction(parts={"gradient": {"table": torch.eye(5).double()}}, lr=0.1)
        >>> bend = curvature(policy, rollouts, direction)
        >>> print(bend)
        -0.09398  95% [-0.1163, -0.07164]
        >>> round(bend.diagnostics["linear_range"], 3)
        0.11
    """
    options = slope_options(options, keywords)
    microbatch = options.microbatch
    check_direction(policy, direction)
    whole(rollouts)
    check_repeatable(policy, rollouts)
    how = used_forward_mode(policy, rollouts, options.mode)
    if policy.top_p < 1:
        raise ValueError(
            f"Curvature at top_p = {policy.top_p:g}: the differences it is made of would "
            "step over changes of the support. It is defined for the full softmax, top_p = 1."
        )
    estimand = options.estimand(policy)
    step = direction_step(policy, direction, how, width)

    def value_of(packed: Rollouts, size: int) -> float:
        sums_NM = _sums(policy, packed, direction, estimand, how, size, step)[:, :6]
        return point(curvature_of_ratio, sums_NM, packed)

    sums_NM = _sums(policy, rollouts, direction, estimand, how, microbatch, step)
    stencil = stencil_of(sums_NM, rollouts, step / direction.lr)
    sums_NM = sums_NM[:, :6]
    here = point(curvature_of_ratio, sums_NM, rollouts)
    repacked = spread(value_of, here, rollouts, microbatch, count=options.repackings)
    base = None
    if rollouts.behaviour_logprob_NS is not None or how == "central":
        base = score_all(policy, policy.params, rollouts, microbatch=microbatch)
    doubts = stale_reasons(base, rollouts, estimand)
    slope = by_prompt(_slope, sums_NM, rollouts, estimand, why_not=doubts, check_tail=True)
    if how == "central":
        g_H = entropy_gradient(
            policy, rollouts, estimand=estimand, microbatch=microbatch, base=base
        )
        slope = led_by_reverse(slope, slope.value, dot(g_H, direction.total))
    floor = max(stencil.rounding, repacked or 0.0)
    estimate = by_prompt(
        curvature_of_ratio,
        sums_NM,
        rollouts,
        estimand,
        noise_floor=floor,
        why_not=doubts,
        check_tail=True,
    )
    estimate = doubted(estimate, stencil)
    worst = max((abs(end) + floor for end in estimate.interval or ()), default=None)
    diagnostics = {
        **estimate.diagnostics,
        "mode": how,
        "slope": slope,
        "linear_range": linear_range(slope.value, estimate.value),
        "linear_range_low": None if worst is None else linear_range(slope.value, worst),
    }
    return replace(estimate, diagnostics=diagnostics)


def linear_range(slope: float, curvature: float, tolerance: float = LINEAR_TOLERANCE) -> float:
    """The largest eta with |eta H'' / 2| <= tolerance * |H'|."""
    if curvature == 0:
        return float("inf")
    return 2 * tolerance * abs(slope) / abs(curvature)


def _sums(
    policy: Policy,
    rollouts: Rollouts,
    direction: Direction,
    estimand: Estimand,
    mode: How,
    microbatch: int,
    step: float,
) -> Tensor:
    """Per rollout: the columns of `estimate.stencil`."""
    v, ranks = direction.total, current()

    def sums(rows_N: Tensor, columns: slice, part: Rollouts) -> Tensor:
        orders = pushforward2(
            lambda params: policy.score(params, part), policy.params, v, how=mode, step=step
        )
        check_scores(orders.value, part, rows_N, columns)
        orders = SecondOrder(*(Scores(*(x.double() for x in order)) for order in orders))
        drawn_NS = drawn_with(orders.value, part)

        def entropy_sums(scores: Scores) -> tuple[Tensor, Tensor]:
            moved_NS = scores.logprob_NS - drawn_NS
            return ratio_sums(payload(scores, estimand), moved_NS, part, estimand)

        return stencil_columns(entropy_sums, orders)

    def local() -> list[Tensor]:
        out_NM = rollouts.weight_N.new_zeros(len(rollouts), COLUMNS)
        for part in ranks.shard(rollouts.split(microbatch, policy)):
            out_NM[part.rows_N] = sums(*part)
        return [out_NM]

    return ranks.all_reduce(local)[0]


def _slope(a: Tensor, b: Tensor, da: Tensor, db: Tensor, dda: Tensor, ddb: Tensor) -> Tensor:
    return (da - a / b * db) / b
