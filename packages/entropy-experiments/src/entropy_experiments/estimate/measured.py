"""Measured entropy change: rollouts of theta, reweighted to speak for theta + eta v.

    snis          sum W_i H_i' / sum W_i T_i     minus the same at eta = 0,   W_i  = w_i exp(lw_i)
    per_decision  sum W_ik h_ik' / sum W_ik      minus the same at eta = 0,   W_ik = prefix weights

See `ratio` for the sums. One base pass serves every direction, eta and clip. The prediction shares
this sample, so their agreement shows linearity, not truth: for that there is `resampled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Generic, NamedTuple, TypeVar, Unpack

import torch
from torch import Tensor

from entropy_experiments.distributed import current, local_part
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
    refuse_unmoved,
    score_all,
    score_each,
)
from entropy_experiments.estimate.support import Support
from entropy_experiments.numerics.derivatives import (
    in_cache,
    norm,
    over_shards,
    shifted,
    square_sum,
)
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
MOST_SETTINGS = 8
"""In memory at a time, where a policy spares work with several."""
SETTINGS_BYTES = 512 << 20
"""What they may take together."""

Key = TypeVar("Key", int, str)


class Case(NamedTuple):
    """One measurement of many: which direction, how far, log-weights clipped where."""

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
    """H(theta + eta v) - H(theta); options are those of `measured_many`."""
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

    Keywords are fields of `options`, and win over them; `form` is "per_decision" or "snis". Each
    costs one no-grad pass over the rollouts (settings of adapters may share it), on top of the base
    pass and the repackings that give the noise floor, which are done once. Diagnostics:
    `weights` (see `WeightDiagnostics`) and, per rollout, `integrand_N` (they sum to the change),
    `entropy_N`, `entropy_base_N`, `tokens_N`.
    """
    if keywords.get("form") == "resampled":
        raise ValueError("form='resampled' is another function: estimate.resampled.resampled.")
    if rollouts.behaviour_logprob_NS is not None and policy.top_p < 1:
        raise ValueError(
            "Rollouts with behaviour_logprob_NS under a top_p law: their support may differ from "
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
    doubt = coarse_weights(policy)
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
            )
            out[Case(name, eta, clip)] = seen.doubted(doubt) if doubt else seen
    return out


def coarse_weights(policy: Policy) -> str:
    """Why a measured change is not trusted: weights with fewer digits than fp32; empty: none.

    Frozen ones count: over a bf16 base, fp32 adapters move activations that are rounded to bf16.
    Other packings round alike, so that the noise floor does not show it.
    """
    model = getattr(policy, "model", None)
    frozen = model.parameters() if isinstance(model, torch.nn.Module) else ()
    for value in (*policy.params.values(), *frozen):
        if value.dtype.is_floating_point and torch.finfo(value.dtype).eps > FP32_EPS:
            kind = str(value.dtype).removeprefix("torch.")
            return f"weights are {kind}, whose rounding the interval has not"
    return ""


class Moved(NamedTuple, Generic[Key]):
    """Scores at theta + eta v, and the share of the step that rounding took."""

    key: Key
    eta: float
    scores: Scores
    rounding: float


def moved_scores(
    policy: Policy,
    rollouts: Rollouts,
    along: Mapping[Key, Callable[[], Params]],
    etas: Sequence[float],
    *,
    base: Scores,
    microbatch: int,
    at_once: int | None = None,
) -> Iterator[Moved[Key]]:
    """Every direction at every eta; `at_once` of the parameter settings are in memory at a time.

    None: several only where that may spare work (`BatchedPolicy`), and they are small. Refused:
    steps that move a top-p support, and scores that follow no step at all.
    """
    if at_once is None:  # rank 0's word: a hook on one rank alone must not part them
        at_once = current().broadcast_from_zero(lambda: _at_once(policy))
    support = Support(policy, rollouts, microbatch)
    cases = [(key, eta) for key in along for eta in etas]
    for start in range(0, len(cases), at_once):
        chunk = cases[start : start + at_once]
        directions = {key: along[key]() for key in dict.fromkeys(key for key, _ in chunk)}
        # A generator of its own: its settings are gone before the next chunk's are made.
        yield from _moved(policy, rollouts, directions, chunk, support, base, microbatch)


def _moved(
    policy: Policy,
    rollouts: Rollouts,
    directions: Mapping[Key, Params],
    cases: Sequence[tuple[Key, float]],
    support: Support,
    base: Scores,
    microbatch: int,
) -> Iterator[Moved[Key]]:
    settings = [shifted(policy.params, directions[key], eta) for key, eta in cases]
    for (_, eta), params in zip(cases, settings, strict=True):
        support.refuse_if_moved(params, eta)
    found = score_each(policy, settings, rollouts, microbatch=microbatch)
    for (key, eta), params, scores in zip(cases, settings, found, strict=True):
        v = directions[key]
        rounding = step_rounding(policy.params, params, v, eta)
        if eta and rounding < 0.5 and torch.equal(scores.logprob_NS, base.logprob_NS):
            refuse_unmoved(policy, rollouts, v)
        yield Moved(key, eta, scores, rounding)


def _total(direction: Direction) -> Params:
    return direction.total


def _at_once(policy: Policy) -> int:
    if not getattr(policy, "spares_work", False):
        return 1
    size = sum(p.numel() * p.element_size() for p in policy.params.values())
    return max(1, min(MOST_SETTINGS, SETTINGS_BYTES // size))


def change(
    base: Scores,
    moved: Scores,
    rollouts: Rollouts,
    estimand: Estimand,
    *,
    clip: float | None = None,
    noise_floor: float | None = None,
    step_rounding: float = 0.0,
) -> Estimate:
    """H under `moved` minus H under `base`, scores of the same rollouts at two parameters."""
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


def odd_and_even(plus: Estimate, minus: Estimate) -> tuple[Estimate, Estimate]:
    """From the changes at +eta and -eta: eta * slope, and eta^2 / 2 * curvature."""
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


def step_rounding(before: Params, after: Params, v: Params, eta: float) -> float:
    """Share of eta v that stored parameters do not show: |after - before - eta v| / |eta v|."""
    size = abs(eta) * norm(v)
    if not size:
        return 0.0
    lost = 0.0
    for name, theta in before.items():
        for old, new, along in in_cache(*map(local_part, (theta, after[name], v[name]))):
            lost += square_sum(_missed(old, new, along, eta))
    return over_shards(lost, before) ** 0.5 / size


def _missed(old: Tensor, new: Tensor, along: Tensor, eta: float) -> Tensor:
    """new - old - eta v in the parameters' precision: of the step it errs by a last digit."""
    dtype = torch.promote_types(old.dtype, torch.float32)
    return (new.to(dtype) - old.to(dtype)).sub_(along.to(dtype), alpha=eta)


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
