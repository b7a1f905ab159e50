"""First-order entropy change: how fast H moves along a direction.

    matched  dH = sum_i w_i [ D H_i + (H_i - H T_i) D S_i ] / sum_i w_i T_i
    to_go    dH = sum_i w_i sum_k [ D h_ik + a_ik D l_ik ] / sum_i w_i T_i
             a_ik = sum_{j>k} (h_ij - H)

matched is the derivative of the snis measurement, to_go that of the per_decision one.

The first term is *direct*: the same states, flatter or sharper choices. The second is the *state*
term: other states visited. Both are derivatives of `ratio_sums`, so neither form is written out
here; `tests/estimate` holds the formulas above against it.

Forward modes give per-rollout terms, hence standard errors. Reverse mode gives g_H, one gradient
that serves every direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from entropy_experiments.distributed import Ranks, current
from entropy_experiments.estimate.baseline import cross_fitted_baseline
from entropy_experiments.estimate.central import led_by_reverse
from entropy_experiments.estimate.gradient import Term, entropy_gradient
from entropy_experiments.estimate.modes import Used, used_mode
from entropy_experiments.estimate.noise import spread
from entropy_experiments.estimate.options import (
    EstimatorOptions,
    SlopeKeywords,
    slope_options,
)
from entropy_experiments.estimate.ratio import (
    check_repeatable,
    check_scores,
    drawn_with,
    no_scores,
    payload,
    ratio_sums,
    refuse_unmoved,
    score_all,
    stale_reasons,
)
from entropy_experiments.numerics.derivatives import (
    How,
    dot,
    dual,
    pushforwards,
    require_full_precision,
)
from entropy_experiments.numerics.sums import by_prompt, point, whole
from entropy_experiments.types import (
    Attribution,
    Direction,
    Estimand,
    Estimate,
    Params,
    Policy,
    Rollouts,
    Scores,
    check_direction,
)
from entropy_experiments.types.direction import sum_of


def first_order(
    policy: Policy,
    rollouts: Rollouts,
    direction: Direction,
    options: EstimatorOptions | None = None,
    *,
    baseline: bool = False,
    base: Scores | None = None,
    **keywords: Unpack[SlopeKeywords],
) -> Estimate:
    """dH per unit learning rate; `eta * first_order(...)` predicts a step.

    Args:
        policy: Parameters at which the slope is taken.
        rollouts: Drawn from this policy (or with `behaviour_logprob_NS`).
        direction: Along which the parameters move.
        options: What entropy is meant, and how it is computed; None: the defaults.
        baseline: Subtract from a_ik what other prompts say it should be given the prefix: the same
            expectation, but no longer the derivative of the measurement on this very sample.
        base: Scores at theta, used where they are needed and not a by-product of differentiating
            (reverse mode, baseline, stale rollouts).
        keywords: Fields of `options`, which win over them; `form` is a slope's: "to_go", the
            derivative of the per_decision measurement, or "matched", of snis.

    Returns:
        The slope. Its diagnostics hold the direct and the state term, and `mode`, the way of
        differentiating that was used (`estimate.modes`).

    Raises:
        ValueError: If the direction belongs to other parameters, or an option has an unknown value.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> rollouts = policy.draw(seed=2)
        >>> direction = Direction(parts={"gradient": {"table": torch.eye(5).double()}}, lr=0.1)
        >>> slope = first_order(policy, rollouts, direction)
        >>> print(direction.lr * slope)  # nats per token of this step
        0.005168  95% [0.004132, 0.006203]
    """
    options = slope_options(options, keywords)
    return _slopes(policy, rollouts, direction, (), options, baseline, base)[0]


def first_order_by_part(
    policy: Policy,
    rollouts: Rollouts,
    direction: Direction,
    options: EstimatorOptions | None = None,
    *,
    baseline: bool = False,
    base: Scores | None = None,
    **keywords: Unpack[SlopeKeywords],
) -> Attribution:
    """The slope along the whole direction and along each of its parts, on the same rollouts.

    By jvp and reverse one pass serves all parts, and the total is their sum. By central all share
    the scores at theta and one gradient. The total's noise floor serves its lines.

    Args:
        policy: Parameters at which the slope is taken.
        rollouts: Drawn from this policy (or with `behaviour_logprob_NS`).
        direction: Along which the parameters move.
        options: What entropy is meant, and how it is computed; None: the defaults.
        baseline: As in `first_order`.
        base: As in `first_order`.
        keywords: Fields of `options`, which win over them; `form` is a slope's: "to_go", the
            derivative of the per_decision measurement, or "matched", of snis.

    Returns:
        The total, a line for each part, and what they leave over.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> rollouts = policy.draw(seed=2)
        >>> direction = Direction(parts={"gradient": {"table": torch.eye(5).double()}}, lr=0.1)
        >>> print(first_order_by_part(policy, rollouts, direction).lines["gradient"])
        0.05168  95% [0.04132, 0.06203]
    """
    options = slope_options(options, keywords)
    parts = tuple(direction.parts)
    total, lines = _slopes(policy, rollouts, direction, parts, options, baseline, base)
    return Attribution.of(total, lines)


def _slopes(
    policy: Policy,
    rollouts: Rollouts,
    direction: Direction,
    parts: Sequence[str],
    options: EstimatorOptions,
    baseline: bool,
    base: Scores | None,
) -> tuple[Estimate, dict[str, Estimate]]:
    """Along the whole direction, and along these parts of it."""
    estimand = options.estimand(policy)
    check_direction(policy, direction)
    whole(rollouts)
    check_repeatable(policy, rollouts)
    mode, microbatch = used_mode(policy, rollouts, options.mode), options.microbatch
    if baseline and (options.slope_form != "to_go" or mode == "reverse"):
        raise ValueError(
            f"baseline=True with form={options.slope_form!r}, mode={mode!r}; it is defined for the "
            "to_go form in a forward mode."
        )
    if mode == "central" and policy.top_p < 1:
        raise ValueError(
            f"mode='central' with top_p = {policy.top_p:g}: a difference would step over changes "
            "of the truncated distribution's support. Use mode='jvp', which keeps the support."
        )
    led = mode in ("reverse", "central")
    if base is None and (rollouts.behaviour_logprob_NS is not None or led):
        base = score_all(policy, policy.params, rollouts, microbatch=microbatch)
    doubts = stale_reasons(base, rollouts, estimand)
    v = direction.total
    along = {part: direction.parts[part] for part in parts}
    if mode == "reverse":
        return _reverse(policy, rollouts, v, along, options, base, doubts)
    how: How = mode
    total, lines = None, dict.fromkeys(parts)
    if how == "central":
        # The values alone: spread and noise floor are the differences' own.
        only = replace(options, repackings=0)
        total, lines = _reverse(policy, rollouts, v, along, only, base, doubts)

    def value_of(packed: Rollouts, size: int) -> float:
        scores, (slope,) = scores_along(
            policy, packed, [v], mode=how, microbatch=size, lr=direction.lr
        )
        return point(_slope, _sums(scores, slope, packed, estimand, baseline, None), packed)

    # Derivatives are linear in the direction; differences are so only nearly.
    added = bool(parts) and how != "central"
    many = list(along.values())
    scores, slopes = scores_along(
        policy,
        rollouts,
        many if added else [v, *many],
        mode=how,
        microbatch=microbatch,
        lr=direction.lr,
    )
    if added:
        slopes = [Scores(*(sum_of(x_NS) for x_NS in zip(*slopes, strict=True))), *slopes]
    sums_NM = _sums(scores, slopes[0], rollouts, estimand, baseline, base)
    if not sums_NM[:, :3].any():
        refuse_unmoved(policy, rollouts, v)
    here = point(_slope, sums_NM, rollouts)
    floor = spread(value_of, here, rollouts, microbatch, count=options.repackings)

    def estimate(slope: Scores, floor: float | None, exact: Estimate | None) -> Estimate:
        x_NM = _sums(scores, slope, rollouts, estimand, baseline, base)
        one = _estimate(x_NM, rollouts, estimand, noise_floor=floor, why_not=doubts, mode=how)
        if exact is None:
            return one
        return led_slope(one, exact, scores, slope, rollouts)

    return estimate(slopes[0], floor, total), {
        part: estimate(slope, None, lines[part])
        for part, slope in zip(parts, slopes[1:], strict=True)
    }


def led_slope(
    estimate: Estimate, exact: Estimate, here: Scores, slope: Scores, rollouts: Rollouts
) -> Estimate:
    """Differences led by reverse mode (`exact`), and so are their direct and state terms.

    What they miss of the derivative is seen without a baseline, which moves the value besides.
    """
    plain_NM = _columns(here, slope, rollouts, estimate.estimand)
    led = led_by_reverse(estimate, point(_slope, plain_NM, rollouts), exact.value)
    terms = {
        name: led_by_reverse(
            estimate.diagnostics[name], point(term, plain_NM, rollouts), exact.diagnostics[name]
        )
        for name, term in (("direct", _direct), ("state", _state))
    }
    # Two looks more at the same differences: a total may be right by chance.
    reasons = [r for one in (led, *terms.values()) for r in one.given_reasons]
    return replace(
        led,
        given_reasons=tuple(dict.fromkeys(reasons)),
        diagnostics={**estimate.diagnostics, **terms},
    )


def _reverse(
    policy: Policy,
    rollouts: Rollouts,
    v: Params,
    parts: Mapping[str, Params],
    options: EstimatorOptions,
    base: Scores | None,
    doubts: tuple[str, ...],
) -> tuple[Estimate, dict[str, Estimate]]:
    """g_H once, for the whole direction and every part."""
    estimand, microbatch = options.estimand(policy), options.microbatch

    def gradient(
        packed: Rollouts, size: int, shared: Scores | None = None, term: Term = "total"
    ) -> Params:
        return entropy_gradient(
            policy, packed, estimand=estimand, term=term, microbatch=size, base=shared
        )

    g_H = gradient(rollouts, microbatch, base)
    g_direct = gradient(rollouts, microbatch, base, "direct")

    def estimate(along: Params, floor: float | None) -> Estimate:
        total, direct = dot(g_H, along), dot(g_direct, along)
        return Estimate.build(
            value=total,
            estimand=estimand,
            noise_floor=floor,
            diagnostics={"direct": direct, "state": total - direct, "mode": "reverse"},
            why_not=doubts,
        )

    floor = spread(
        lambda packed, size: dot(gradient(packed, size), v),
        dot(g_H, v),
        rollouts,
        microbatch,
        count=options.repackings,
    )
    return estimate(v, floor), {part: estimate(along, None) for part, along in parts.items()}


def scores_along(
    policy: Policy,
    rollouts: Rollouts,
    many: Sequence[Params],
    *,
    mode: How,
    lr: float | None = None,
    microbatch: int = 8,
    ranks: Ranks | None = None,
) -> tuple[Scores, list[Scores]]:
    """The scores at theta and their derivatives along each direction, in fp64.

    By jvp one pass gives all; central takes one pass at theta and two for each direction, about
    `lr` away.
    `ranks`: None are the current ones, of `distributed.across`.
    """
    ranks = ranks or current()
    whole(rollouts)
    require_full_precision(policy.params)

    def local() -> list[Tensor]:
        out = [no_scores(rollouts) for _ in range(1 + len(many))]
        for rows_N, columns, part in ranks.shard(rollouts.split(microbatch, policy)):

            def score(params: Params) -> Scores:
                return policy.score(params, part)

            here, slopes = pushforwards(score, policy.params, many, how=mode, lr=lr)
            check_scores(here, part, rows_N, columns)
            for all_NS, part_NS in zip(out, (here, *slopes), strict=True):
                for whole_NS, x_NS in zip(all_NS, part_NS, strict=True):
                    whole_NS[rows_N, columns] = x_NS.double()
        return [x_NS for scores in out for x_NS in scores]

    sums = ranks.all_reduce(local)
    here, *slopes = (Scores(*pair) for pair in zip(sums[::2], sums[1::2], strict=True))
    return here, slopes


def slope_of_scores(
    scores: Scores,
    slope: Scores,
    rollouts: Rollouts,
    estimand: Estimand,
    *,
    mode: How,
    noise_floor: float | None = None,
) -> Estimate:
    """dH per unit learning rate, from what `scores_along` gives."""
    return _estimate(
        _columns(scores, slope, rollouts, estimand),
        rollouts,
        estimand,
        noise_floor=noise_floor,
        why_not=stale_reasons(scores, rollouts, estimand),
        mode=mode,
    )


def _estimate(
    sums_NM: Tensor,
    rollouts: Rollouts,
    estimand: Estimand,
    *,
    noise_floor: float | None,
    why_not: Iterable[str],
    mode: Used,
) -> Estimate:
    return by_prompt(
        _slope,
        sums_NM,
        rollouts,
        estimand,
        noise_floor=noise_floor,
        diagnostics={
            "direct": by_prompt(_direct, sums_NM, rollouts, estimand),
            "state": by_prompt(_state, sums_NM, rollouts, estimand),
            "mode": mode,
            "tokens_N": rollouts.tokens_N,
            "truncated": rollouts.truncated_share,
        },
        why_not=why_not,
        check_tail=True,
    )


def _sums(
    scores: Scores,
    slope: Scores,
    rollouts: Rollouts,
    estimand: Estimand,
    baseline: bool,
    base: Scores | None,
) -> Tensor:
    """Per rollout: direct and state part of A', then B', A and B."""
    sums_NM = _columns(scores, slope, rollouts, estimand)
    if baseline:
        expected_NS = cross_fitted_baseline(base or scores, rollouts, estimand)
        spared_NS = expected_NS * slope.logprob_NS
        sums_NM[:, 1] -= torch.where(rollouts.response_NS, spared_NS, 0.0).sum(1)
    return sums_NM


def _columns(scores: Scores, slope: Scores, part: Rollouts, estimand: Estimand) -> Tensor:
    paid_NS, dpaid_NS = payload(scores, estimand), payload(slope, estimand)
    moved_NS = scores.logprob_NS - drawn_with(scores, part)

    def along(dpaid_NS: Tensor, dmoved_NS: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return dual(
            lambda paid_NS, moved_NS: ratio_sums(paid_NS, moved_NS, part, estimand),
            (paid_NS, moved_NS),
            (dpaid_NS, dmoved_NS),
        )

    nothing_NS = torch.zeros_like(paid_NS)
    (top_N, bottom_N), (direct_N, _) = along(dpaid_NS, nothing_NS)
    _, (state_N, length_N) = along(nothing_NS, slope.logprob_NS)
    return torch.stack([direct_N, state_N, length_N, top_N, bottom_N], dim=1)


def _direct(direct: Tensor, state: Tensor, length: Tensor, top: Tensor, bottom: Tensor) -> Tensor:
    return direct / bottom


def _state(direct: Tensor, state: Tensor, length: Tensor, top: Tensor, bottom: Tensor) -> Tensor:
    return (state - top / bottom * length) / bottom


def _slope(direct: Tensor, state: Tensor, length: Tensor, top: Tensor, bottom: Tensor) -> Tensor:
    return (direct + state - top / bottom * length) / bottom
