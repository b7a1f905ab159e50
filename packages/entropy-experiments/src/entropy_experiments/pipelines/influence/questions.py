"""What a study is asked about an evaluation batch, each answer a stage of its own.

ledgers      who moved its entropy, and who its expected reward
left_out     the step without one rollout, nothing frozen
what_if      a counterfactual step, predicted
confirmed    a counterfactual step, made and measured
fisher       the kernel between evaluation and update rollouts, and the log-prob changes that it
             predicts of the step's gradient part, against those that are measured
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.fisher import (
    check_cosine,
    fisher_blocks,
    logprob_changes,
    one_per_rollout,
    rollout_coefficients,
)
from entropy_experiments.attribution.leave_one_out import leave_one_out
from entropy_experiments.attribution.step import close_ledger, close_reward_ledger
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.measured import measured
from entropy_experiments.pipelines.influence.evaluation import Evaluation
from entropy_experiments.pipelines.influence.packing import unpack_estimate
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.pipelines.influence.summary_json import (
    confirmation_json,
    ledger_json,
    prediction_json,
)
from entropy_experiments.results import (
    ConfirmationAnswer,
    Ledgers,
    LeftOut,
    LeftOutAnswer,
    Unanswered,
    WhatIf,
    numbers,
)
from entropy_experiments.sampling.advantages import advantages_by_prompt


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
            study.columns,
            evaluation.matrix,
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
            study.columns,
            evaluation.matrix,
            lambda: study.lines,
        )
        return Stage(facts={"ledger": ledger_json(ledger)})

    key = ["reward", study.mode, study.lasting, evaluation.matrix_key]
    return evaluation.stage("reward", key, 30, compute)


Answer = TypeVar("Answer")


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
