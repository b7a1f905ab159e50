"""Measured entropy change: rollouts of theta, reweighted to speak for theta + eta v.

    snis          sum W_i H_i' / sum W_i T_i     minus the same at eta = 0,   W_i  = w_i exp(lw_i)
    per_decision  sum W_ik h_ik' / sum W_ik      minus the same at eta = 0,   W_ik = prefix weights

See `ratio` for the sums. One base pass serves every direction, eta and clip. The prediction shares
this sample, so their agreement shows linearity, not truth: for that there is `resampled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from entropy_experiments.estimate.noise import repackings_of
from entropy_experiments.estimate.options import (
    EstimatorOptions,
    MeasureKeywords,
    measure_options,
)
from entropy_experiments.estimate.ratio import (
    check_repeatable,
    drawn_with,
    payload,
    ratio_sums,
    score_all,
)
from entropy_experiments.estimate.several_directions import moved_scores
from entropy_experiments.numerics.sums import by_prompt, point, whole
from entropy_experiments.numerics.weights import diagnose
from entropy_experiments.types import (
    Direction,
    Estimand,
    Estimate,
    Params,
    Policy,
    Rollouts,
    Scores,
    check_direction,
)

MAX_STEP_ROUNDING = 0.05
FP32_EPS = torch.finfo(torch.float32).eps


class Case(NamedTuple):
    """One measurement of many: which direction, how far, log-weights clipped where.

    Attributes:
        direction: Name of the direction.
        eta: Learning rate.
        clip: Bound on |log-weight|; None: not clipped.

    Examples:
        >>> Case("step", 0.1)
        Case(direction='step', eta=0.1, clip=None)
    """

    direction: str
    eta: float
    clip: float | None = None


def measured(
    policy: Policy,
    rollouts: Rollouts,
    direction: Direction,
    eta: float,
    options: EstimatorOptions | None = None,
    *,
    clips: Sequence[float | None] = (None,),
    base: Scores | None = None,
    **keywords: Unpack[MeasureKeywords],
) -> Estimate:
    """H(theta + eta v) - H(theta), by reweighting the rollouts of theta.

    Args:
        policy: Parameters before the step.
        rollouts: Drawn from this policy (or with `behaviour_logprob_NS`).
        direction: v.
        eta: The learning rate.
        options: What entropy is meant, and how it is computed; None: the defaults.
        clips: One bound on |log-weight|; None: not clipped.
        base: Scores at theta, if they are there already.
        keywords: Fields of `options`, which win over them; `form` is "per_decision", which weights
            each token by its prefix, or "snis", each rollout as a whole.

    Returns:
        The change, with the diagnostics of `measured_many`.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> rollouts = policy.draw(seed=2)
        >>> direction = Direction(parts={"gradient": {"table": torch.eye(5).double()}}, lr=0.1)
        >>> print(measured(policy, rollouts, direction, 0.1))
        0.004675  95% [0.003541, 0.005809]
    """
    changes = measured_many(
        policy,
        rollouts,
        {"direction": direction},
        [eta],
        options,
        clips=clips,
        base=base,
        **keywords,
    )
    return next(iter(changes.values()))


def measured_many(
    policy: Policy,
    rollouts: Rollouts,
    directions: Mapping[str, Direction],
    etas: Iterable[float],
    options: EstimatorOptions | None = None,
    *,
    symmetric: bool = False,
    clips: Sequence[float | None] = (None,),
    base: Scores | None = None,
    **keywords: Unpack[MeasureKeywords],
) -> dict[Case, Estimate]:
    """Every direction at every eta (and -eta, if symmetric) under every clip.

    Each costs one no-grad pass over the rollouts (settings of adapters may share it), on top of the
    base pass and the repackings that give the noise floor, which are done once.

    Args:
        policy: Parameters before the step.
        rollouts: Drawn from this policy (or with `behaviour_logprob_NS`).
        directions: By name.
        etas: Learning rates.
        options: What entropy is meant, and how it is computed; None: the defaults.
        symmetric: Also at -eta, for `odd_and_even`.
        clips: Bounds on |log-weight|; None: not clipped.
        base: Scores at theta, if they are there already.
        keywords: Fields of `options`, which win over them; `form` is "per_decision", which weights
            each token by its prefix, or "snis", each rollout as a whole.

    Returns:
        The change of each case. Diagnostics: `weights` (see `WeightDiagnostics`) and, per rollout,
        `integrand_N` (they sum to the change), `entropy_N`, `entropy_base_N`, `tokens_N`.

    Raises:
        ValueError: If there is no finite eta, a direction belongs to other parameters, or stale
            rollouts meet a policy with top_p below 1.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> rollouts = policy.draw(seed=2)
        >>> direction = Direction(parts={"gradient": {"table": torch.eye(5).double()}}, lr=0.1)
        >>> changes = measured_many(policy, rollouts, {"step": direction}, [0.05, 0.1])
        >>> print(changes[Case("step", 0.1)])
        0.004675  95% [0.003541, 0.005809]
    """
    if keywords.get("form") == "resampled":
        raise ValueError("form='resampled' is another function: estimate.resampled.resampled.")
    if rollouts.behaviour_logprob_NS is not None and policy.top_p < 1:
        raise ValueError(
            "Rollouts with behaviour_logprob_NS under top_p < 1: their support may differ from "
            "the policy's, and no weight repairs that. Draw them from the policy itself."
        )
    options = measure_options(options, keywords)
    estimand, microbatch = options.estimand(policy), options.forward_size
    steps = [float(eta) for eta in etas]
    if not steps or not all(isfinite(eta) for eta in steps):
        raise ValueError(f"etas is {steps}; expected one or more finite numbers.")
    if symmetric:
        steps = list(dict.fromkeys(sign * eta for eta in steps for sign in (1, -1)))
    for direction in directions.values():
        check_direction(policy, direction)
    whole(rollouts)
    check_repeatable(policy, rollouts)

    base = base or score_all(policy, policy.params, rollouts, microbatch=microbatch)
    floors = noise_floors(
        policy, rollouts, base, estimand, clips, microbatch=microbatch, count=options.repackings
    )
    doubt, dtype = coarse_weights(policy), coarsest_dtype(policy)
    out: dict[Case, Estimate] = {}
    along = {name: partial(_total, direction) for name, direction in directions.items()}
    for name, eta, moved, rounding in moved_scores(
        policy, rollouts, along, steps, base=base, microbatch=microbatch
    ):
        for clip in clips:
            seen = change(
                base,
                moved,
                rollouts,
                estimand,
                clip=clip,
                noise_floor=floors[clip],
                step_rounding=rounding,
                computed_in=dtype,
            )
            out[Case(name, eta, clip)] = seen.doubted(doubt) if doubt else seen
    return out


def coarse_weights(policy: Policy) -> str:
    """Why a measured change is not trusted: weights with fewer digits than fp32; empty: none.

    Frozen ones count: over a bf16 base, fp32 adapters move activations that are rounded to bf16.
    Other packings round alike, so that the noise floor does not show it.
    """
    dtype = coarsest_dtype(policy)
    if torch.finfo(dtype).eps <= FP32_EPS:
        return ""
    kind = str(dtype).removeprefix("torch.")
    return f"weights are {kind}, whose rounding the interval has not"


def coarsest_dtype(policy: Policy) -> torch.dtype:
    """Of all weights, frozen ones included: that with the fewest digits."""
    model = getattr(policy, "model", None)
    frozen = model.parameters() if isinstance(model, torch.nn.Module) else ()
    kinds = {value.dtype for value in (*policy.params.values(), *frozen)}
    floating = [kind for kind in kinds if kind.is_floating_point]
    return max(floating, key=lambda kind: torch.finfo(kind).eps, default=torch.float64)


def _total(direction: Direction) -> Params:
    return direction.total


def change(
    base: Scores,
    moved: Scores,
    rollouts: Rollouts,
    estimand: Estimand,
    *,
    clip: float | None = None,
    noise_floor: float | None = None,
    step_rounding: float = 0.0,
    computed_in: torch.dtype | None = None,
) -> Estimate:
    """H under `moved` minus H under `base`, scores of the same rollouts at two parameters.

    `computed_in`: the dtype of the scores' computation, below whose rounding no change is trusted;
    packings that round alike have a noise floor of 0. None: the scores are exact.
    """
    sums_N4, moved_NS = _change_sums(base, moved, rollouts, estimand, clip)
    weight_N1 = rollouts.weight_N[:, None]
    new_top_N, new_N, old_top_N, old_N = (weight_N1 * sums_N4).unbind(1)
    if not (bool(torch.isfinite(sums_N4).all()) and float(new_N.sum()) > 0):
        low, high = (float(end) for end in moved_NS.sum(1).aminmax())
        raise ValueError(
            f"Importance weights leave the range of fp64: log-weights from {low:.4g} to "
            f"{high:.4g}. The step is far outside what these rollouts can speak for: take a "
            "smaller eta."
        )
    weights = diagnose(moved_NS, rollouts, per_decision=estimand.form == "per_decision", clip=clip)
    inside_NS = rollouts.response_NS
    doubts = list(weights.why_not)
    if step_rounding > MAX_STEP_ROUNDING:
        doubts.append(
            f"{step_rounding:.0%} of the step is lost when theta + eta v is stored: the "
            "parameters' dtype is too coarse for this eta"
        )
    value, level = point(_difference, sums_N4, rollouts), float(old_top_N.sum() / old_N.sum())
    if computed_in is not None and abs(value) < (least := _rounding(computed_in, level)):
        doubts.append(
            f"|{value:.3g}| is below {least:.3g}, the rounding of the entropy in "
            f"{str(computed_in).removeprefix('torch.')}: take a larger eta, or compute in float64"
        )
    return by_prompt(
        _difference,
        sums_N4,
        rollouts,
        estimand,
        noise_floor=noise_floor,
        why_not=doubts,
        diagnostics={
            "weights": weights,
            "step_rounding": step_rounding,
            "clip": clip,
            "integrand_N": new_top_N / new_N.sum() - old_top_N / old_N.sum(),
            "entropy_N": torch.where(inside_NS, payload(moved, estimand), 0.0).sum(1),
            "entropy_base_N": torch.where(inside_NS, payload(base, estimand), 0.0).sum(1),
            "tokens_N": rollouts.tokens_N,
            "truncated": rollouts.truncated_share,
        },
    )


def _rounding(dtype: torch.dtype, level: float) -> float:
    """In nats. Log-probs of likely tokens, too, are differences of numbers of size 1 and more."""
    return torch.finfo(dtype).eps * max(1.0, abs(level))


def odd_and_even(plus: Estimate, minus: Estimate) -> tuple[Estimate, Estimate]:
    """From the changes at +eta and -eta: eta * slope, and eta^2 / 2 * curvature.

    Args:
        plus: The change at +eta.
        minus: The change at -eta, on the same rollouts.

    Returns:
        The odd and the even part, with paired intervals.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> rollouts = policy.draw(seed=2)
        >>> direction = Direction(parts={"gradient": {"table": torch.eye(5).double()}}, lr=0.1)
        >>> both = measured_many(policy, rollouts, {"v": direction}, [0.1], symmetric=True)
        >>> odd, even = odd_and_even(both[Case("v", 0.1)], both[Case("v", -0.1)])
        >>> print(odd)
        0.005145  95% [0.004108, 0.006181]
    """
    return 0.5 * (plus - minus), 0.5 * (plus + minus)


def even_part(predicted: Estimate, minus: Estimate) -> Estimate:
    """eta * slope + Delta(-eta) = eta^2 / 2 * curvature + O(eta^3): what a straight line misses.

    `minus` is measured at theta - eta v, in the form that `predicted` differentiates and on the
    same rollouts. Added to the prediction it gives 2 eta * slope + Delta(-eta): second order.
    """
    return predicted + minus


def _change_sums(
    base: Scores, moved: Scores, rollouts: Rollouts, estimand: Estimand, clip: float | None
) -> tuple[Tensor, Tensor]:
    reference_NS = drawn_with(base, rollouts)
    old_NS, new_NS = (s.logprob_NS - reference_NS for s in (base, moved))
    new = ratio_sums(payload(moved, estimand), new_NS, rollouts, estimand, clip=clip)
    old = ratio_sums(payload(base, estimand), old_NS, rollouts, estimand, clip=clip)
    return torch.stack([*new, *old], 1), torch.where(rollouts.response_NS, new_NS, 0.0)


def _difference(new_top: Tensor, new: Tensor, old_top: Tensor, old: Tensor) -> Tensor:
    return new_top / new - old_top / old


def noise_floors(
    policy: Policy,
    rollouts: Rollouts,
    base: Scores,
    estimand: Estimand,
    clips: Sequence[float | None],
    *,
    microbatch: int,
    count: int,
) -> dict[float | None, float | None]:
    """Root mean square of the "change" between packings at unchanged parameters, by clip."""
    squares: dict[float | None, list[float]] = {clip: [] for clip in clips}
    for packing in repackings_of(rollouts, microbatch, count=count):
        again = score_all(policy, policy.params, packing.rollouts, microbatch=packing.microbatch)
        again = Scores(*(packing.restored(x_NS) for x_NS in again))
        for clip in clips:
            sums_N4, _ = _change_sums(base, again, rollouts, estimand, clip)
            squares[clip].append(point(_difference, sums_N4, rollouts) ** 2)
    return {clip: (sum(s) / count) ** 0.5 if count else None for clip, s in squares.items()}
