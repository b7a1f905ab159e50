"""What a study says, stage by stage: of every evaluation batch its ledgers and answers.

ledgers      what changed its entropy, and its expected reward
left_out     the step without one rollout, nothing frozen
what_if      a counterfactual step, predicted
confirmed    a counterfactual step, made and measured
fisher       the kernel between evaluation and update rollouts, and the log-prob changes that it
             predicts of the step's gradient part, against those that are measured

`study_results` collects all of them, computing what is not stored yet; the ledger inside training
fills the same values with what `analyze_step` returns. `files` turns them into bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.attribution.fisher import (
    check_cosine,
    fisher_blocks,
    logprob_changes,
    one_per_rollout,
    rollout_coefficients,
)
from entropy_experiments.attribution.leave_one_out import leave_one_out
from entropy_experiments.attribution.matrix import InfluenceMatrix
from entropy_experiments.attribution.step import close_ledger, close_reward_ledger
from entropy_experiments.attribution.tokens import TokenInfluence
from entropy_experiments.config import Config
from entropy_experiments.config.sections import BatchRequest
from entropy_experiments.distributed import current
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.measured import measured
from entropy_experiments.numerics.derivatives import How
from entropy_experiments.pipelines.influence.certified import still_open
from entropy_experiments.pipelines.influence.momentum import momentum_stage
from entropy_experiments.pipelines.influence.packing import unpack_estimate
from entropy_experiments.pipelines.influence.sharded import ABSENT_OF_SHARDED
from entropy_experiments.pipelines.influence.stages import Evaluation, Study, evaluations_of
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.pipelines.influence.summary_json import (
    confirmation_json,
    ledger_json,
    prediction_json,
)
from entropy_experiments.results import (
    ConfirmationAnswer,
    EstimateResult,
    LedgerResult,
    Ledgers,
    LeftOut,
    LeftOutAnswer,
    StepResult,
    Unanswered,
    WhatIf,
    numbers,
)
from entropy_experiments.sampling.advantages import advantages_by_prompt
from entropy_experiments.types import Direction, Estimand, Rollouts, UpdateBatch
from entropy_experiments.update.objective import Objective

Answer = TypeVar("Answer")


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
    matrix: InfluenceMatrix | None
    """None: the model is cut over ranks; `StudyResults.absent` says so."""
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
    momentum: Stage | Unanswered | None = None
    """Momentum by the batches that it came from, or why it is one line ("error")."""


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
    bound: bool
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
    absent: Mapping[str, str] = field(default_factory=dict)
    """Parts of a study that this one cannot have, and why."""


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
        bound=probe.bound,
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
        absent=ABSENT_OF_SHARDED if study.sharded else {},
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
        momentum=_momentum(evaluation, both["entropy"]),
    )


def ledgers(evaluation: Evaluation) -> Ledgers:
    """JSON of both; the reward's is None where E has no rewards."""
    both: Ledgers = {"entropy": entropy_stage(evaluation).facts["ledger"], "reward": None}
    if evaluation.study.asked.reward and evaluation.batch.reward_N is not None:
        both["reward"] = reward_stage(evaluation).facts["ledger"]
    return both


def entropy_stage(evaluation: Evaluation) -> Stage:
    study = evaluation.study

    def compute() -> Stage:
        ledger = close_ledger(
            study.step,
            study.rebuilt,
            evaluation.rollouts,
            evaluation.base,
            evaluation.lines(),
            unpack_estimate(evaluation.whole, study.estimand),
        )
        return Stage(facts={"ledger": ledger_json(ledger)})

    key = ["ledger", study.mode, study.lasting, evaluation.matrix_key, evaluation.measured_key]
    return evaluation.stage("ledger", key, 12, compute)


def reward_stage(evaluation: Evaluation) -> Stage:
    study = evaluation.study

    def compute() -> Stage:
        ledger = close_reward_ledger(
            study.step,
            study.rebuilt,
            evaluation.rollouts,
            evaluation.batch.reward_N,
            evaluation.base,
            None if study.sharded else study.columns,
            evaluation.matrix,
            lambda: study.lines,
        )
        return Stage(facts={"ledger": ledger_json(ledger)})

    key = ["reward", study.mode, study.lasting, evaluation.matrix_key]
    return evaluation.stage("reward", key, 30, compute)


def _momentum(evaluation: Evaluation, ledger: LedgerResult) -> Stage | Unanswered | None:
    """Of the first evaluation batch; None: there is no momentum, or nobody wants it split."""
    study = evaluation.study
    if study.momentum_batches == 0 or study.inputs.evaluations[0] is not evaluation.batch:
        return None
    try:
        earlier = study.earlier_steps
        if earlier is None:
            return None
        return momentum_stage(evaluation, earlier, ledger["lines"]["momentum"]["this_step"])
    except (ValueError, OSError) as error:
        return {"error": str(error)}
    except (torch.OutOfMemoryError, MemoryError):
        if current().size > 1:
            raise  # the other ranks wait for this one
        return {
            "error": "the earlier checkpoints do not fit into memory beside this one; --momentum 0 "
            "does not try"
        }


def answer_or_error(answer: Callable[[], Answer]) -> Answer | Unanswered:
    """A question that has no answer says why, and costs the study nothing else."""
    try:
        return answer()
    except ValueError as error:
        return {"error": str(error)}


def left_out_or_error(evaluation: Evaluation, row: int) -> LeftOut:
    """`left_out`, or why the step cannot be made without this rollout."""
    try:
        return left_out(evaluation, row)
    except ValueError as error:
        return {"rollout": row, "error": str(error)}


def left_out(evaluation: Evaluation, row: int) -> LeftOutAnswer:
    """The step without one rollout, nothing frozen: predicted, against the whole step."""
    study, probe = evaluation.study, evaluation.probe

    def compute() -> Stage:
        step, lr = study.step, study.direction.lr
        estimator = replace(step.estimator, repackings=0)
        without = leave_one_out(
            step.trained,
            step.batch,
            step.options.objective,
            step.optimizer,
            row,
            advantage_of=advantages_by_prompt(probe.facts["advantage"]),
            max_grad_norm=step.options.max_grad_norm,
            microbatch=estimator.microbatch,
        )
        whole, rest = (
            lr
            * first_order(
                step.policy, evaluation.rollouts, direction, estimator, base=evaluation.base
            )
            for direction in (study.direction, without.direction)
        )
        change = measured(
            step.policy,
            evaluation.rollouts,
            without.direction,
            lr,
            estimator,
            base=evaluation.base,
            clips=(step.options.clip,),
        )
        return Stage(
            facts={
                "rollout": row,
                "label": without.label,
                "influence": float(evaluation.tokens.rollout_N[row]),
                "first_order": numbers(rest),
                "measured": numbers(change),
                "difference": numbers(whole - rest),
                "clip_factor": without.direction.clip_factor,
            }
        )

    key = ["without", row, study.mode, probe.facts["advantage"], evaluation.tokens_key]
    stage = evaluation.stage(f"without_{row:03d}", key, 9, compute)
    return cast(LeftOutAnswer, stage.facts)


def what_if(evaluation: Evaluation, text: str) -> WhatIf:
    """A counterfactual step: predicted from the token table and, where asked, confirmed."""
    try:
        prediction = whatif.repredict(evaluation.tokens, text)
    except ValueError as error:
        return {"name": text, "error": str(error)}
    confirmation = None
    if evaluation.study.asked.confirm:
        confirmation = answer_or_error(lambda: confirmed(evaluation, text))
    return {
        "name": prediction.name,
        "prediction": prediction_json(prediction),
        "confirmation": confirmation,
    }


def confirmed(evaluation: Evaluation, text: str) -> ConfirmationAnswer:
    """The counterfactual step made in full, and measured; its weights are never clipped."""
    study = evaluation.study

    def compute() -> Stage:
        step = study.step
        confirmation = whatif.confirm(
            step.policy,
            evaluation.rollouts,
            step.trained,
            evaluation.tokens,
            study.direction,
            step.optimizer,
            text,
            max_grad_norm=step.options.max_grad_norm,
            mode=study.mode,
            microbatch=step.estimator.microbatch,
            base=evaluation.base,
        )
        return Stage(facts={**confirmation_json(confirmation), "clip_c": None})

    key = ["confirm", text, study.mode, evaluation.tokens_key]
    return cast(ConfirmationAnswer, evaluation.stage("confirm", key, 30, compute).facts)


def fisher(evaluation: Evaluation) -> Stage:
    """Kernel and cosine [N_E, N_U]; contributions, predicted and measured change at etas[0]."""
    study = evaluation.study
    eta, centred = study.etas[0], study.asked.fisher_centred

    def compute() -> Stage:
        step, direction = study.step, study.direction
        p = direction.preconditioner
        assert p is not None  # an AdamW step has one
        check_cosine(p)
        batch, coefficient = step.batch.rollouts, evaluation.tokens.coefficient
        kernel = fisher_blocks(
            step.policy,
            evaluation.rollouts,
            batch,
            p,
            centred=centred,
            trained=step.trained,
            block_bytes=step.options.block_bytes,
            microbatch=step.estimator.microbatch,
        )
        # What is centred no longer adds up to the step.
        if not centred and one_per_rollout(coefficient, batch):
            weighed_EN = kernel.value_NM * rollout_coefficients(coefficient, batch).to(
                kernel.value_NM
            )
        else:
            weighed_EN = fisher_blocks(
                step.policy,
                evaluation.rollouts,
                batch,
                p,
                cotangent=coefficient,
                trained=step.trained,
                block_bytes=step.options.block_bytes,
                microbatch=step.estimator.microbatch,
            ).value_NM
        measured_E = logprob_changes(
            step.policy,
            evaluation.rollouts,
            direction.only("gradient"),
            eta,
            base=evaluation.base,
            microbatch=step.estimator.forward_size,
        )
        return Stage(
            facts={"eta": eta, "centred": centred},
            tensors={
                "kernel_EN": kernel.value_NM,
                "cosine_EN": kernel.cosine_NM,
                "contribution_EN": -eta * direction.clip_factor * weighed_EN,
                "measured_E": measured_E.double(),
            },
        )

    key = ["fisher", centred, eta, study.asked.gradient_block_mb, evaluation.tokens_key]
    update = 6 * len(evaluation.probe.update.rollouts) / len(evaluation.rollouts)
    return evaluation.stage("fisher", key, 6 + update, compute)
