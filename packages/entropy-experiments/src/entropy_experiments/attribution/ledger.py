"""The ledger of a step: what each term of it did to the entropy, or to the expected reward.

    measured = sum of lines + curvature + unexplained

A line is lr times the slope along its share of the step (`lines`). The curvature term,
lr^2 / 2 D_v D_v, is computed, never found by subtraction, so `unexplained` can be large: it holds
orders three and up, and mistakes. All come from the same rollouts, hence a paired interval.

*This step* is what the lines say; *eventual* is what they do in the end (`attribution.eventual`).

Both quantities can stand side by side: entropy spent, reward bought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from entropy_experiments.attribution.eventual import eventual
from entropy_experiments.attribution.terms import (
    LINES,
    line_directions,
    line_objectives,
    sum_rule_tolerance,
)
from entropy_experiments.estimate.curvature import curvature as entropy_curvature
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.level import level_of_scores, within_entropy
from entropy_experiments.estimate.measured import measured as entropy_change
from entropy_experiments.estimate.modes import used_forward_mode
from entropy_experiments.estimate.options import (
    EstimatorOptions,
    RewardKeywords,
    SlopeKeywords,
    reward_options,
    slope_options,
)
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.estimate.reward import (
    check_rewards,
    reward_change,
    reward_curvature,
    reward_estimand,
    reward_slope,
    reward_slope_by_prompt,
    single_prompts,
)
from entropy_experiments.types import (
    Direction,
    Estimand,
    Estimate,
    Params,
    Policy,
    Rollouts,
    Scores,
    UpdateBatch,
    combine,
)
from entropy_experiments.types.direction import BASELINE_PARTS, sum_of
from entropy_experiments.types.estimate import Quantity
from entropy_experiments.update.objective import Objective

__all__ = ["LINES", "Ledger", "entropy_ledger", "reward_ledger"]

CHANCE = 16
"""From so many on, equal rewards of two sets of rollouts are no coincidence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ledger:
    """Changes of one step, at its learning rate: nats of entropy, or units of reward."""

    quantity: Quantity
    lines: Mapping[str, Estimate]
    """This step, in the order of LINES; terms that the objective lacks are absent."""
    eventual: Mapping[str, Estimate]
    predicted: Estimate
    """The sum of the lines."""
    curvature: Estimate | None
    """lr^2 / 2 times the second derivative; None where it is not defined (top_p below 1)."""
    measured: Estimate
    unexplained: Estimate | None
    """measured - predicted - curvature, paired; None without a curvature."""
    predicted_by_prompt: Estimate | None = None
    """Rewards only: the prediction of less variance, where every prompt has two rollouts."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = {
            **self.lines,
            "predicted": self.predicted,
            "curvature": self.curvature,
            "measured": self.measured,
            "unexplained": self.unexplained,
        }
        return "\n".join(f"{name:13s} {'none' if e is None else e}" for name, e in rows.items())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Known:
    """What of the ledger is at hand already, and how to find the rest."""

    lines: Mapping[str, Estimate] | None
    curvature: Estimate | None
    measured: Estimate | None
    slope_of: Callable[[Direction], Estimate]
    """Per unit learning rate."""
    curvature_of: Callable[[], Estimate]
    change_of: Callable[[], Estimate]


def entropy_ledger(
    policy: Policy,
    evaluation: Rollouts,
    trained: Policy,
    batch: UpdateBatch,
    objective: Objective,
    direction: Direction,
    options: EstimatorOptions | None = None,
    *,
    momentum_decay: float,
    coupled_decay: bool = False,
    base: Scores | None = None,
    directions: Mapping[str, Params] | None = None,
    lines: Mapping[str, Estimate] | None = None,
    curvature: Estimate | None = None,
    measured: Estimate | None = None,
    **keywords: Unpack[SlopeKeywords],
) -> Ledger:
    """What changed the entropy of `policy`, which `trained` saw as the loss does.

    `momentum_decay` is b1, and `coupled_decay` says that weight decay is added to the gradient;
    `eventual.momentum_of` reads both from an optimizer. What is at hand need not be computed
    again: `directions` as `line_directions` gives them; `lines`, in nats of the step; `curvature`,
    as `estimate.curvature` gives it; `measured`, the change at the direction's lr. `repackings`
    are for the measurement's noise floor, and 0 unless they are a keyword. Keywords are fields of
    `options`, and win over them; `form` is "to_go" or "matched".
    """
    options = slope_options(options, keywords)
    mode = used_forward_mode(policy, evaluation, options.mode)
    slopes = replace(options, mode=mode, repackings=0)
    base = base or score_all(policy, policy.params, evaluation, microbatch=options.forward_size)
    ready = _Known(
        lines=lines,
        curvature=curvature,
        measured=measured,
        slope_of=lambda along: first_order(policy, evaluation, along, slopes, base=base),
        curvature_of=lambda: entropy_curvature(policy, evaluation, direction, slopes),
        change_of=lambda: entropy_change(
            policy,
            evaluation,
            direction,
            direction.lr,
            replace(options, repackings=keywords.get("repackings", 0)),
            base=base,
        ),
    )
    estimand = options.estimand(policy)
    step = _Step(
        policy=policy,
        trained=trained,
        batch=batch,
        objective=objective,
        direction=direction,
        momentum_decay=momentum_decay,
        coupled_decay=coupled_decay,
        microbatch=options.microbatch,
    )
    ledger = _ledger(step, ready, estimand, directions)
    level = level_of_scores(base, evaluation, estimand)
    return replace(ledger, predicted=within_entropy(ledger.predicted, level))


def reward_ledger(
    policy: Policy,
    evaluation: Rollouts,
    reward_N: Tensor | None,
    trained: Policy,
    batch: UpdateBatch,
    objective: Objective,
    direction: Direction,
    options: EstimatorOptions | None = None,
    *,
    momentum_decay: float,
    coupled_decay: bool = False,
    base: Scores | None = None,
    directions: Mapping[str, Params] | None = None,
    score_slopes: Mapping[str, Tensor] | None = None,
    lines: Mapping[str, Estimate] | None = None,
    curvature: Estimate | None = None,
    measured: Estimate | None = None,
    **keywords: Unpack[RewardKeywords],
) -> Ledger:
    """What changed the expected reward; `reward_N` are the rewards of the evaluation rollouts.

    Options as in `entropy_ledger`. A reward has one form (snis) and one unit (the response).
    `score_slopes`, D S of every evaluation rollout along each line's direction, spare the passes
    of the lines (an influence matrix of snis form has them: dbottom over bottom).
    """
    rewards_N = check_rewards(reward_N, evaluation)
    _refuse_rewards_of(batch, rewards_N, evaluation)
    options = reward_options(options, keywords)
    mode = used_forward_mode(policy, evaluation, options.mode)
    slopes = replace(options, mode=mode, repackings=0)
    base = base or score_all(policy, policy.params, evaluation, microbatch=options.forward_size)
    known = _Known(
        lines=lines,
        curvature=curvature,
        measured=measured,
        slope_of=lambda along: reward_slope(
            policy, evaluation, rewards_N, along, slopes, base=base
        ),
        curvature_of=lambda: reward_curvature(policy, evaluation, rewards_N, direction, slopes),
        change_of=lambda: reward_change(
            policy,
            evaluation,
            rewards_N,
            direction,
            direction.lr,
            replace(options, repackings=keywords.get("repackings", 0)),
            base=base,
        ),
    )
    estimand = reward_estimand(policy, prompts=options.prompts, horizon=options.horizon)
    step = _Step(
        policy=policy,
        trained=trained,
        batch=batch,
        objective=objective,
        direction=direction,
        momentum_decay=momentum_decay,
        coupled_decay=coupled_decay,
        microbatch=options.microbatch,
    )
    slope_N = None
    if score_slopes is not None and lines is None:
        _check_names("score_slopes", score_slopes, step)
        slope_N = sum_of(score_slopes[name] for name in step.names)
        ready = {
            name: direction.lr
            * reward_slope(
                policy,
                evaluation,
                rewards_N,
                direction,
                slopes,
                base=base,
                slope_N=score_slopes[name],
            )
            for name in step.names
        }
        known = replace(known, lines=ready)
    ledger = _ledger(step, known, estimand, directions)
    notes = list(ledger.notes)
    if evaluation.fingerprint == batch.rollouts.fingerprint:
        notes.append(
            "the evaluation rollouts are the update's own: along a step, the reward of the batch "
            "that made it rises by construction"
        )
    lonely = single_prompts(evaluation)
    if lonely:
        notes.append(f"no prediction by prompt: {len(lonely)} prompts have one rollout")
        return replace(ledger, notes=tuple(notes))
    within = reward_slope_by_prompt(
        policy, evaluation, rewards_N, direction, slopes, base=base, slope_N=slope_N
    )
    return replace(ledger, notes=tuple(notes), predicted_by_prompt=direction.lr * within)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    policy: Policy
    trained: Policy
    batch: UpdateBatch
    objective: Objective
    direction: Direction
    momentum_decay: float
    coupled_decay: bool
    microbatch: int

    def __post_init__(self) -> None:
        if not 0 <= self.momentum_decay < 1:
            raise ValueError(
                f"momentum_decay is {self.momentum_decay}; expected b1 of the optimizer, at least "
                "0 and below 1."
            )

    @property
    def names(self) -> list[str]:
        has = {*self.direction.parts, *line_objectives(self.objective, self.batch)}
        return [name for name in LINES if name in has]

    def directions(self) -> dict[str, Params]:
        return line_directions(
            self.trained, self.batch, self.objective, self.direction, microbatch=self.microbatch
        )


def _ledger(
    step: _Step, known: _Known, estimand: Estimand, directions: Mapping[str, Params] | None
) -> Ledger:
    lr, notes = step.direction.lr, []
    if known.lines is not None:
        _check_names("lines", known.lines, step)
        lines = {name: known.lines[name] for name in step.names}
    else:
        along = directions or step.directions()
        _check_names("directions", along, step)
        lines = {
            name: lr * known.slope_of(Direction(parts={name: along[name]}, lr=lr))
            for name in step.names
        }
    _refuse_other_meaning(lines, estimand)
    if step.policy.top_p < 1:
        bend, total = None, lr * known.slope_of(step.direction)
        notes.append(
            f"no curvature under top_p = {step.policy.top_p:g}, hence nothing said about what is "
            "unexplained"
        )
    else:
        second = known.curvature or known.curvature_of()
        total, bend = lr * second.diagnostics["slope"], lr**2 / 2 * second
    predicted = combine((1.0, line) for line in lines.values())
    _refuse_other_sum(predicted, total, lines, step.policy.params)
    # A small line may rest on one prompt and the sum not: the sum has the doubts of the whole.
    predicted = replace(predicted, given_reasons=total.given_reasons)
    change = known.measured or known.change_of()
    rest = None
    if bend is not None:
        rest = combine([(1.0, change), (-1.0, predicted), (-1.0, bend)])
    return Ledger(
        quantity=estimand.quantity,
        lines=lines,
        eventual={
            name: eventual(name, line, step.momentum_decay, coupled_decay=step.coupled_decay)
            for name, line in lines.items()
        },
        predicted=predicted,
        curvature=bend,
        measured=change,
        unexplained=rest,
        notes=tuple(notes),
    )


def _check_names(what: str, names: Iterable[str], step: _Step) -> None:
    if set(names) != set(step.names):
        raise ValueError(
            f"{what} has {sorted(names)}; expected {step.names}: the parts {BASELINE_PARTS} of the "
            "direction and a line for every term of the objective."
        )


def _refuse_rewards_of(batch: UpdateBatch, reward_N: Tensor, evaluation: Rollouts) -> None:
    """The update's rewards beside other rollouts; (E may be U itself, which gets a note)."""
    theirs_N = batch.reward_N
    if theirs_N is None or evaluation.fingerprint == batch.rollouts.fingerprint:
        return
    theirs_N = theirs_N.to(reward_N)
    # A few rewards, or rewards that are all alike, may well be equal by chance.
    telling = len(reward_N) >= CHANCE and bool((reward_N != reward_N[0]).any())
    if telling and torch.equal(reward_N, theirs_N):
        raise ValueError(
            f"All {len(reward_N)} values of reward_N are the update batch's rewards, but the "
            "evaluation rollouts are others; expected the rewards of the evaluation rollouts. "
            "The update's rewards made the step, which raises them by construction."
        )


def _refuse_other_meaning(lines: Mapping[str, Estimate], estimand: Estimand) -> None:
    for name, line in lines.items():
        if not line.estimand.matches(estimand):
            raise ValueError(
                f"The line {name!r} is an estimate of {line.estimand}; expected {estimand}. "
                "Compute it with the options of the ledger."
            )


def _refuse_other_sum(
    predicted: Estimate, total: Estimate, lines: Mapping[str, Estimate], params: Params
) -> None:
    size = sum(abs(line.value) for line in lines.values()) + abs(total.value)
    limit = sum_rule_tolerance(params)
    gap = abs(predicted.value - total.value)
    if gap > limit * size:
        raise ValueError(
            f"The lines sum to {predicted.value:.6g}, the whole step's slope gives "
            f"{total.value:.6g}: off by {gap / size:.3g} of the lines' size, expected at most "
            f"{limit:.1g}. Lines must be in units of the step (learning rate included), of this "
            "direction and these rollouts."
        )
