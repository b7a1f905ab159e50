"""Measured entropy change: rollouts of theta, reweighted to speak for theta + eta v.

    snis          sum W_i H_i' / sum W_i T_i     minus the same at eta = 0,   W_i  = w_i exp(lw_i)
    per_decision  sum W_ik h_ik' / sum W_ik      minus the same at eta = 0,   W_ik = prefix weights

See `ratio` for the sums. One base pass serves every direction, eta and clip. The prediction shares
this sample, so their agreement shows linearity, not truth: for that there is `resampled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from entropy_experiments.estimate.noise import REPACKINGS, repackings
from entropy_experiments.estimate.ratio import (
    drawn_with,
    estimand_of,
    payload,
    ratio,
    ratio_sums,
    score_all,
)
from entropy_experiments.numerics.derivatives import shifted
from entropy_experiments.numerics.sums import by_prompt
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
from entropy_experiments.types.estimate import Entropy, Form, Prompts, Unit


class Case(NamedTuple):
    """One measurement of many: which direction, how far, log-weights clipped where."""

    direction: str
    eta: float
    clip: float | None = None


def entropy_level(
    policy: Policy,
    rollouts: Rollouts,
    *,
    form: Form = "per_decision",
    unit: Unit = "token",
    entropy: Entropy = "rao_blackwell",
    prompts: Prompts = "population",
    horizon: int | None = None,
    microbatch: int = 8,
    base: Scores | None = None,
) -> Estimate:
    """H of the policy itself."""
    estimand = estimand_of(
        policy, prompts=prompts, unit=unit, form=form, entropy=entropy, horizon=horizon
    )
    base = base or score_all(policy, policy.params, rollouts, microbatch=microbatch)
    logratio_NS = base.logprob_NS - drawn_with(base, rollouts)
    sums_N = ratio_sums(payload(base, estimand), logratio_NS, rollouts, estimand)
    return by_prompt(ratio, torch.stack(sums_N, 1), rollouts, estimand)


def measured(
    policy: Policy, rollouts: Rollouts, direction: Direction, eta: float, **options
) -> Estimate:
    """H(theta + eta v) - H(theta); options are those of `measured_many`."""
    found = measured_many(policy, rollouts, {"direction": direction}, [eta], **options)
    return next(iter(found.values()))


def measured_many(
    policy: Policy,
    rollouts: Rollouts,
    directions: Mapping[str, Direction],
    etas: Iterable[float],
    *,
    form: Form = "per_decision",
    unit: Unit = "token",
    entropy: Entropy = "rao_blackwell",
    prompts: Prompts = "population",
    horizon: int | None = None,
    symmetric: bool = False,
    clips: Sequence[float | None] = (None,),
    microbatch: int = 8,
    base: Scores | None = None,
    repackings: int = REPACKINGS,
) -> dict[Case, Estimate]:
    """Every direction at every eta (and -eta, if symmetric) under every clip.

    Each costs one no-grad pass over the rollouts, on top of the base pass and the repackings that
    give the noise floor, which are done once. Diagnostics: `weights` (see `WeightDiagnostics`) and,
    per rollout, `integrand_N` (they sum to the change), `entropy_N`, `entropy_base_N`, `tokens_N`.
    """
    if form == "resampled":
        raise ValueError("form='resampled' is another function: estimate.resampled.resampled.")
    if rollouts.behaviour_logprob_NS is not None and policy.top_p < 1:
        raise ValueError("Rollouts of another policy cannot be reweighted under a top_p law.")
    estimand = estimand_of(
        policy, prompts=prompts, unit=unit, form=form, entropy=entropy, horizon=horizon
    )
    steps = [float(eta) for eta in etas]
    if not steps or not all(isfinite(eta) for eta in steps):
        raise ValueError(f"etas is {steps}; expected one or more finite numbers.")
    if symmetric:
        steps = list(dict.fromkeys(sign * eta for eta in steps for sign in (1, -1)))
    for direction in directions.values():
        check_direction(policy, direction)

    base = base or score_all(policy, policy.params, rollouts, microbatch=microbatch)
    floors = {
        clip: _noise_floor(policy, rollouts, base, estimand, clip, microbatch, repackings)
        for clip in clips
    }
    out: dict[Case, Estimate] = {}
    for name, direction in directions.items():
        total = direction.total
        for eta in steps:
            params = shifted(policy.params, total, eta)
            _refuse_moved_support(policy, params, rollouts, eta)
            moved = score_all(policy, params, rollouts, microbatch=microbatch)
            for clip in clips:
                out[Case(name, eta, clip)] = change(
                    base, moved, rollouts, estimand, clip=clip, noise_floor=floors[clip]
                )
    return out


def change(
    base: Scores,
    moved: Scores,
    rollouts: Rollouts,
    estimand: Estimand,
    *,
    clip: float | None = None,
    noise_floor: float | None = None,
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
    return by_prompt(
        _difference,
        sums_N4,
        rollouts,
        estimand,
        noise_floor=noise_floor,
        why_not=weights.why_not,
        diagnostics={
            "weights": weights,
            "clip": clip,
            "integrand_N": new_top_N / new_N.sum() - old_top_N / old_N.sum(),
            "entropy_N": torch.where(inside_NS, payload(moved, estimand), 0.0).sum(1),
            "entropy_base_N": torch.where(inside_NS, payload(base, estimand), 0.0).sum(1),
            "tokens_N": rollouts.tokens_N,
            "truncated": float(rollouts.truncated_N.double().mean()),
        },
    )


def odd_and_even(plus: Estimate, minus: Estimate) -> tuple[Estimate, Estimate]:
    """From the changes at +eta and -eta: eta * slope, and eta^2 / 2 * curvature."""
    return 0.5 * (plus - minus), 0.5 * (plus + minus)


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


def _noise_floor(
    policy: Policy,
    rollouts: Rollouts,
    base: Scores,
    estimand: Estimand,
    clip: float | None,
    microbatch: int,
    count: int,
) -> float | None:
    """Root mean square of the "change" between packings at unchanged parameters."""
    squares = []
    for packing in repackings(rollouts, microbatch, count=count):
        again = score_all(policy, policy.params, packing.rollouts, microbatch=packing.microbatch)
        width = rollouts.tokens_NS.shape[1]
        again = Scores(*(packing.restored(x_NS)[:, :width] for x_NS in again))
        sums_N4, _ = _change_sums(base, again, rollouts, estimand, clip)
        means = (rollouts.weight_N[:, None] * sums_N4).sum(0)
        squares.append(float(_difference(*means)) ** 2)
    return (sum(squares) / count) ** 0.5 if squares else None


def _refuse_moved_support(policy: Policy, params: Params, rollouts: Rollouts, eta: float) -> None:
    if policy.top_p >= 1:
        return
    with torch.no_grad():
        here_NS, there_NS = (policy.support(p, rollouts) for p in (policy.params, params))
    moved = rollouts.response_NS & (here_NS != there_NS)
    if moved.any():
        raise ValueError(
            f"At eta = {eta:g} the top_p = {policy.top_p:g} support changes at {int(moved.sum())} "
            f"of {int(rollouts.response_NS.sum())} tokens: the entropy of a truncated law jumps "
            "there and cannot be measured by reweighting. Use a smaller eta, or top_p = 1."
        )
