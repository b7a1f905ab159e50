"""What a finished study found, whoever computed it: all that its files are made from.

`study_results` takes it from a study's stages; the ledger inside training fills it with what
`analyze_step` returns. `files` turns it into bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.attribution.matrix import InfluenceMatrix
from entropy_experiments.attribution.tokens import TokenInfluence
from entropy_experiments.config import Config
from entropy_experiments.config.sections import BatchRequest
from entropy_experiments.numerics.derivatives import How
from entropy_experiments.pipelines.influence.certified import still_open
from entropy_experiments.pipelines.influence.evaluation import Evaluation, evaluations_of
from entropy_experiments.pipelines.influence.questions import (
    answer_or_error,
    fisher,
    ledgers,
    left_out_or_error,
    what_if,
)
from entropy_experiments.pipelines.influence.stages import Study
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.results import (
    EstimateResult,
    Ledgers,
    LeftOut,
    StepResult,
    Unanswered,
    WhatIf,
)
from entropy_experiments.types import Direction, Estimand, Rollouts, UpdateBatch
from entropy_experiments.update.objective import Objective


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationResults:
    """What one evaluation batch says about the step."""

    name: str
    request: BatchRequest
    """What was asked for; summary.json repeats its kind and parameters."""
    rollouts: Rollouts
    reward_N: Tensor | None
    notes: tuple[str, ...]
    level: EstimateResult
    """The entropy before the step."""
    matrix: InfluenceMatrix
    tokens: TokenInfluence
    changes: Stage
    """Measured along the whole step and its baseline: `full|eta` and `baseline|eta`."""
    measured_rows: Sequence[int]
    """Update rollouts that `rollout_changes` is about."""
    rollout_changes: Stage
    """Measured along single rollouts: `grad|row|eta` and `both|row|eta`."""
    ledgers: Ledgers
    """The reward's is None where there are no rewards."""
    left_out: Sequence[LeftOut] = ()
    what_if: Sequence[WhatIf] = ()
    fisher: Stage | Unanswered | None = None
    """The kernel and its changes; why there are none ("error"); None: nobody asked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyResults:
    """One step, and what its evaluation batches say about it."""

    folder: Path
    """Where the files go."""
    checkpoint: str
    step: int | None
    base: str
    config: Config
    """As the study was asked for: config.yaml, and the plan in summary.json."""
    decode: Callable[[list[int]], str]
    batch: UpdateBatch
    real: bool
    """Training made this step of the batch."""
    objective: Objective
    direction: Direction
    step_json: StepResult
    momentum_decay: float
    coupled_decay: bool
    estimand: Estimand
    mode: How
    clip: float | None
    etas: tuple[float, ...]
    per_sequence_etas: tuple[float, ...]
    evaluations: tuple[EvaluationResults, ...]
    notes: tuple[str, ...]
    assumed: Mapping[str, Any]
    not_verifiable: tuple[str, ...]
    timings: Mapping[str, float]
    input_hashes: Mapping[str, str]
    coverage: Mapping[str, Any] = field(default_factory=dict)


def study_results(study: Study) -> StudyResults:
    """Computes every stage that is not stored yet."""
    evaluations = tuple(_evaluation_results(one) for one in evaluations_of(study))
    probe, step = study.probe, cast(StepResult, study.step_stage.facts)
    certified = step.get("certified", {})
    momentum_decay, coupled_decay = momentum_of(probe.optimizer)
    return StudyResults(
        folder=study.store.folder.parent,
        checkpoint=probe.checkpoint.name,
        step=probe.checkpoint.step,
        base=probe.checkpoint.base,
        config=study.config,
        decode=probe.checkpoint.tokenizer.decode,
        batch=probe.update,
        real=probe.real,
        objective=study.objective,
        direction=study.direction,
        step_json=step,
        momentum_decay=momentum_decay,
        coupled_decay=coupled_decay,
        estimand=study.estimand,
        mode=study.mode,
        clip=study.config.measure.clip_log_weights,
        etas=study.etas,
        per_sequence_etas=study.per_sequence_etas,
        evaluations=evaluations,
        notes=probe.notes,
        assumed=probe.facts.assumed,
        not_verifiable=still_open(probe.not_verifiable, certified.get("step_distance")),
        timings=study.timings,
        input_hashes=probe.checkpoint.hashes,
        coverage=probe.checkpoint.coverage,
    )


def _evaluation_results(evaluation: Evaluation) -> EvaluationResults:
    batch, options = evaluation.batch, evaluation.study.asked
    both = ledgers(evaluation)
    return EvaluationResults(
        name=evaluation.name,
        request=batch.request,
        rollouts=evaluation.rollouts,
        reward_N=batch.reward_N,
        notes=batch.notes,
        level=evaluation.level,
        matrix=evaluation.matrix,
        tokens=evaluation.tokens,
        changes=evaluation.whole,
        measured_rows=evaluation.measured_rows,
        rollout_changes=evaluation.singles,
        ledgers=both,
        left_out=[left_out_or_error(evaluation, row) for row in options.leave_one_out],
        what_if=[what_if(evaluation, text) for text in options.what_if],
        fisher=answer_or_error(lambda: fisher(evaluation)) if options.fisher else None,
    )
