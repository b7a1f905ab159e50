"""The stages of one analysed step: plain functions, each with a frozen result.

    rebuild_step         the direction and its parts, from the batch and the optimizer's state
    score_evaluation     scores and entropy of the evaluation rollouts before the step
    line_columns         which columns of the matrix add up to each line of the ledger
    pair_matrix          every pair of rollouts; the lines ride along, and g_H by fold
    line_slopes          the lines along directions of their own, where there is no matrix
    token_influences     every update token
    measure_step         changes along the step, and along momentum and decay, at every eta
    measure_rollouts     changes along single update rollouts
    close_ledger         what changed the entropy; closes to what was measured
    close_reward_ledger  the same of the expected reward

`analyze_step` composes them in memory. The resumable study composes them with a store between.

A matrix needs the gradient of every update rollout, which a model cut over ranks does not give in
one pass. There is none then: g_H comes from one backward over E, the lines from directions of their
own, and single rollouts that are measured from a backward each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.attribution.finite import finite_columns
from entropy_experiments.attribution.folds import prompt_folds
from entropy_experiments.attribution.ledger import Ledger, entropy_ledger, reward_ledger
from entropy_experiments.attribution.matrix import (
    InfluenceMatrix,
    influence_matrix,
    update_direction,
    update_directions,
)
from entropy_experiments.attribution.tokens import TokenInfluence, token_influence
from entropy_experiments.estimate.first_order import first_order_by_part
from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.estimate.measured import noise_floors
from entropy_experiments.estimate.modes import cut_over_ranks, used_forward_mode
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.estimate.reward import reward_change
from entropy_experiments.numerics.rollout_gradients import BLOCK_BYTES
from entropy_experiments.types import (
    Direction,
    Estimate,
    OptimizerState,
    Params,
    Policy,
    Rollouts,
    Scores,
    UpdateBatch,
)
from entropy_experiments.types.direction import BASELINE_PARTS, sum_of
from entropy_experiments.update.adamw import compute_update_vector_adamw
from entropy_experiments.update.gradient import as_trained
from entropy_experiments.update.live import live_state
from entropy_experiments.update.objective import Objective
from entropy_experiments.update.optimizer import own_step

FULL, BASELINE = "full", "baseline"
"""What is measured: the whole step; momentum and decay."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How the step was made, and how it is analysed.

    Args:
        objective: The training loss.
        max_grad_norm: Of gradient clipping; None: none.
        estimator: What entropy is meant, and how it is computed.
        folds: Parts of the evaluation prompts whose agreement gives tokens their error bars.
        block_bytes: Memory for gradients of single rollouts.
        clip: Of the measurement's log-weights; None: not clipped.
        measured_rollouts: Update rollouts along whose own directions the change is measured, too:
            so many, the largest by first-order influence.
        grad_chunk: Parameter settings in memory at a time when changes are measured; None: one.

    Examples:
        >>> StepOptions(objective=Objective(loss="dapo"), max_grad_norm=1.0).objective.loss
        'dapo'
    """

    objective: Objective = field(default_factory=Objective)
    max_grad_norm: float | None = None
    estimator: EstimatorOptions = field(default_factory=EstimatorOptions)
    folds: int = 2
    block_bytes: int = BLOCK_BYTES
    clip: float | None = None
    measured_rollouts: int = 0
    grad_chunk: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """One optimizer step to analyse: what it is made of, and how it is looked at."""

    policy: Policy
    """Whose entropy it is; parameters as they are before the step."""
    trained: Policy
    """The same as the loss sees it, with training's own gradient."""
    batch: UpdateBatch
    optimizer: OptimizerState
    options: StepOptions

    @property
    def estimator(self) -> EstimatorOptions:
        return self.options.estimator


@dataclass(frozen=True, kw_only=True, eq=False)
class RebuiltStep:
    """theta + lr * direction.total, as the optimizer would make it of the batch."""

    direction: Direction
    scores: Scores
    """Of the update rollouts, as the loss sees them."""
    loss: float
    norms: Mapping[str, float]
    """Of every part, and of the gradient before and after clipping."""
    precision: Mapping[str, str]

    @property
    def baseline(self) -> Direction:
        """Momentum and decay: what the optimizer would do with a zero gradient."""
        return self.direction.only(*(p for p in BASELINE_PARTS if p in self.direction.parts))


@dataclass(frozen=True, kw_only=True, eq=False)
class BaseScores:
    """The evaluation rollouts before the step."""

    scores: Scores
    level: Estimate


@dataclass(frozen=True, kw_only=True, eq=False)
class LineColumns:
    """How the ledger's lines are read off the matrix."""

    directions: Mapping[str, Params]
    """Lines that are no sums of update rollouts: columns of their own."""
    of_lines: Mapping[str, Sequence[int | str]]
    """By line: the columns that add up to it."""


def step_inputs(
    policy: Policy,
    optimizer: OptimizerState | torch.optim.Optimizer,
    batch: UpdateBatch,
    options: StepOptions,
    *,
    trained: Policy | None = None,
) -> StepInputs:
    """The step that `optimizer` is about to make of `batch`; nothing is computed yet.

    `trained`: the policy as the loss sees it, where that differs (another temperature).
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        if reason := own_step(optimizer):
            raise ValueError(
                f"{reason[0].upper()}{reason[1:]}; expected torch's own Adam or AdamW. Judge the "
                "step that it makes: entropy_experiments.observed()."
            )
        optimizer = live_state(policy.params, optimizer)
    momentum_of(optimizer)  # other optimizers are refused before anything is computed
    return StepInputs(
        policy=policy,
        trained=as_trained(policy if trained is None else trained),
        batch=batch,
        optimizer=optimizer,
        options=options,
    )


def rebuild_step(step: StepInputs) -> tuple[RebuiltStep, Params]:
    """The step, and the loss gradient before clipping that it is made of."""
    direction, _, stats = compute_update_vector_adamw(
        step.trained,
        step.batch,
        step.options.objective,
        step.optimizer,
        max_grad_norm=step.options.max_grad_norm,
        microbatch=step.estimator.microbatch,
    )
    rebuilt = RebuiltStep(
        direction=direction,
        scores=stats.found.scores,
        loss=stats.loss,
        norms={
            **stats.part_norms,
            "grad_norm": stats.grad_norm,
            "clipped_norm": stats.clipped_norm,
        },
        precision=dict(stats.precision),
    )
    return rebuilt, stats.found.gradient


def score_evaluation(
    policy: Policy, evaluation: Rollouts, estimator: EstimatorOptions
) -> BaseScores:
    """The one pass at theta that every later stage shares."""
    scores = score_all(policy, policy.params, evaluation, microbatch=estimator.forward_size)
    level = entropy_level(policy, evaluation, estimator, base=scores)
    return BaseScores(scores=scores, level=level)


def line_columns(
    direction: Direction,
    by_line: Mapping[str, Sequence[int]] | None,
    line_directions: Callable[[], Mapping[str, Params]],
) -> LineColumns:
    """Where no rollout is in two lines (`by_line`), a line is a sum of rollouts' columns.

    Elsewhere (None) each line has a direction of its own, which `line_directions` gives.
    """
    if by_line is None:
        own = line_directions()
    else:
        own = {name: direction.parts[name] for name in BASELINE_PARTS if name in direction.parts}
    of_lines: dict[str, Sequence[int | str]] = {name: [name] for name in own}
    return LineColumns(directions=own, of_lines={**of_lines, **(by_line or {})})


def pair_matrix(
    step: StepInputs,
    rebuilt: RebuiltStep,
    evaluation: Rollouts,
    base: Scores,
    columns: LineColumns,
    *,
    folds: int,
) -> InfluenceMatrix:
    """What each update rollout and each line did, seen by each evaluation rollout."""
    return influence_matrix(
        step.policy,
        evaluation,
        step.trained,
        step.batch,
        step.options.objective,
        rebuilt.direction,
        estimand=step.estimator.estimand(step.policy),
        microbatch=step.estimator.microbatch,
        block_bytes=step.options.block_bytes,
        base=base,
        scores=rebuilt.scores,
        extra=columns.directions,
        fold_N=prompt_folds(evaluation, folds),
    )


def token_influences(
    step: StepInputs,
    rebuilt: RebuiltStep,
    evaluation: Rollouts,
    base: Scores,
    gradients: Sequence[Params] | None,
    *,
    folds: int,
) -> TokenInfluence:
    """What each update token did; `gradients`: g_H of every fold, or None to compute them.

    Differences magnify the last digit of g_H. So they take it from a backward of their own, which
    gives the same bits for a whole model and for one cut over ranks; a matrix gives others.
    """
    mode = used_forward_mode(step.policy, evaluation, step.estimator.mode)
    return token_influence(
        step.policy,
        evaluation,
        step.trained,
        step.batch,
        step.options.objective,
        rebuilt.direction,
        estimand=step.estimator.estimand(step.policy),
        folds=folds,
        mode=mode,
        microbatch=step.estimator.microbatch,
        base=base,
        scores=rebuilt.scores,
        gradients=None if mode == "central" else gradients,
    )


def measure_step(
    step: StepInputs,
    rebuilt: RebuiltStep,
    evaluation: Rollouts,
    base: Scores,
    etas: Sequence[float],
) -> dict[tuple[str, float], Estimate]:
    """Changes along FULL and BASELINE at every eta, all with one noise floor."""
    estimator, clip = step.estimator, step.options.clip
    floors = noise_floors(
        step.policy,
        evaluation,
        base,
        estimator.estimand(step.policy),
        (clip,),
        microbatch=estimator.forward_size,
        count=estimator.repackings,
    )
    along = {FULL: rebuilt.direction.total, BASELINE: rebuilt.baseline.total}
    return _measured(step, evaluation, base, along, etas, floors[clip])


def most_influential(tokens: TokenInfluence, count: int) -> list[int]:
    """The update rollouts with the largest first-order influence, in their own order."""
    order_N = tokens.rollout_N.abs().argsort(descending=True, stable=True)
    return sorted(order_N[:count].tolist())


def measure_rollouts(
    step: StepInputs,
    rebuilt: RebuiltStep,
    evaluation: Rollouts,
    base: Scores,
    coefficient: Scores,
    rows: Sequence[int],
    etas: Sequence[float],
    *,
    noise_floor: float | None,
) -> dict[tuple[str, float], Estimate]:
    """Changes along single rollouts: `grad|row` alone, `both|row` on top of momentum and decay.

    `coefficient` is the loss's derivative by each token's scores, `noise_floor` that of the whole
    step: the packings are the same.
    """
    baseline = rebuilt.baseline.total
    along: dict[str, Params] = {}
    for row, own in zip(rows, _rollout_directions(step, rebuilt, coefficient, rows), strict=True):
        along[f"grad|{row}"] = own
        along[f"both|{row}"] = {
            name: sum_of((value.to(baseline[name]), baseline[name])) for name, value in own.items()
        }
    return _measured(step, evaluation, base, along, etas, noise_floor)


def _rollout_directions(
    step: StepInputs, rebuilt: RebuiltStep, coefficient: Scores, rows: Sequence[int]
) -> list[Params]:
    """Each of these rollouts' share of the step."""
    microbatch = step.estimator.microbatch
    if cut_over_ranks(step.trained):
        return [
            update_direction(
                step.trained,
                step.batch,
                coefficient,
                rebuilt.direction,
                row=row,
                microbatch=microbatch,
            )
            for row in rows
        ]
    stack = update_directions(
        step.trained,
        step.batch,
        coefficient,
        rebuilt.direction,
        rows=rows,
        microbatch=microbatch,
    )
    return [{name: value[i] for name, value in stack.items()} for i in range(len(rows))]


def lines_of_matrix(
    rebuilt: RebuiltStep, columns: LineColumns, matrix: InfluenceMatrix
) -> dict[str, Estimate]:
    """Every line of the ledger in nats of the step, read off the matrix."""
    lr = rebuilt.direction.lr
    return {name: lr * matrix.slope(*of_line) for name, of_line in columns.of_lines.items()}


def line_slopes(
    step: StepInputs,
    rebuilt: RebuiltStep,
    evaluation: Rollouts,
    base: Scores,
    directions: Mapping[str, Params],
) -> dict[str, Estimate]:
    """The same without a matrix, along `line_directions`: one gradient of E serves all lines."""
    lr = rebuilt.direction.lr
    slopes = first_order_by_part(
        step.policy,
        evaluation,
        Direction(parts=directions, lr=lr),
        replace(step.estimator, repackings=0),
        base=base,
    )
    return {name: lr * slope for name, slope in slopes.lines.items()}


def close_ledger(
    step: StepInputs,
    rebuilt: RebuiltStep,
    evaluation: Rollouts,
    base: Scores,
    lines: Mapping[str, Estimate],
    change: Estimate,
) -> Ledger:
    """What changed the entropy, by `lines` in nats of the step.

    `change` was measured along the whole step at its learning rate.
    """
    momentum_decay, coupled_decay = momentum_of(step.optimizer)
    return entropy_ledger(
        step.policy,
        evaluation,
        step.trained,
        step.batch,
        step.options.objective,
        rebuilt.direction,
        step.estimator,
        momentum_decay=momentum_decay,
        coupled_decay=coupled_decay,
        base=base,
        lines=lines,
        measured=change,
    )


def close_reward_ledger(
    step: StepInputs,
    rebuilt: RebuiltStep,
    evaluation: Rollouts,
    reward_N: Tensor | None,
    base: Scores,
    columns: LineColumns | None,
    matrix: InfluenceMatrix | None,
    line_directions: Callable[[], Mapping[str, Params]],
) -> Ledger:
    """What changed the expected reward; `reward_N` are the evaluation rollouts' own rewards.

    A reward's form is snis: a matrix of that form has its slopes; others, and a step without a
    matrix, need the lines' directions.
    """
    momentum_decay, coupled_decay = momentum_of(step.optimizer)
    direction = rebuilt.direction
    # One size for all passes: the curvature that the change is compared with has it, too.
    estimator = replace(step.estimator, forward_microbatch=None)
    score_slopes = None
    if matrix is not None and columns is not None and estimator.form == "snis":
        score_slopes = {
            name: matrix.score_slopes(*of_line) for name, of_line in columns.of_lines.items()
        }
    return reward_ledger(
        step.policy,
        evaluation,
        reward_N,
        step.trained,
        step.batch,
        step.options.objective,
        direction,
        estimator,
        momentum_decay=momentum_decay,
        coupled_decay=coupled_decay,
        base=base,
        directions=line_directions() if score_slopes is None else None,
        score_slopes=score_slopes,
        measured=reward_change(
            step.policy,
            evaluation,
            reward_N,
            direction,
            direction.lr,
            replace(estimator, repackings=0),
            base=base,
            clip=step.options.clip,
        ),
    )


def _measured(
    step: StepInputs,
    evaluation: Rollouts,
    base: Scores,
    along: Mapping[str, Params],
    etas: Sequence[float],
    noise_floor: float | None,
) -> dict[tuple[str, float], Estimate]:
    return finite_columns(
        step.policy,
        evaluation,
        along,
        etas,
        estimand=step.estimator.estimand(step.policy),
        microbatch=step.estimator.forward_size,
        grad_chunk=step.options.grad_chunk,
        clip=step.options.clip,
        base=base,
        noise_floor=noise_floor,
    )
