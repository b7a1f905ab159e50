"""What else a study is asked about an evaluation batch, each answer a stage of its own.

left_out     the step without one rollout, nothing frozen
confirmed    a counterfactual step, made and measured
fisher       the kernel between evaluation and update rollouts, and the log-prob changes that it
             predicts of the step's gradient part, against those that are measured
"""

from __future__ import annotations

from typing import Any

from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.fisher import (
    check_cosine,
    fisher_blocks,
    logprob_changes,
    one_per_rollout,
    rollout_coefficients,
)
from entropy_experiments.attribution.leave_one_out import leave_one_out
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.measured import measured
from entropy_experiments.pipelines.influence.evaluation import Evaluation
from entropy_experiments.pipelines.influence.facts import confirmation_facts
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.results import numbers
from entropy_experiments.sampling.advantages import advantages_by_prompt


def left_out(found: Evaluation, row: int) -> dict[str, Any]:
    """The step without one rollout, nothing frozen: predicted, against the whole step."""
    study, probe = found.study, found.probe

    def compute() -> Stage:
        without = leave_one_out(
            *study.update_side,
            probe.optimizer,
            row,
            advantage_of=advantages_by_prompt(probe.facts["advantage"]),
            max_grad_norm=study.max_grad_norm,
            microbatch=study.microbatch,
        )
        options = {**found.known, **study.speaks, "mode": study.mode, "repackings": 0}
        lr = study.direction.lr
        whole, rest = (
            lr * first_order(*found.asked_of, direction, **options)
            for direction in (study.direction, without.direction)
        )
        seen = measured(
            *found.asked_of,
            without.direction,
            lr,
            base=found.base,
            clips=(found.clip,),
            repackings=0,
            **probe.measuring,
        )
        return Stage(
            facts={
                "rollout": row,
                "label": without.label,
                "influence": float(found.tokens.rollout_N[row]),
                "first_order": numbers(rest),
                "measured": numbers(seen),
                "difference": numbers(whole - rest),
                "clip_factor": without.direction.clip_factor,
            }
        )

    key = ["without", row, study.mode, probe.facts["advantage"], found.tokens_key]
    return dict(found.stage(f"without_{row:03d}", key, 9, compute).facts)


def confirmed(found: Evaluation, text: str) -> dict[str, Any]:
    """The counterfactual step made in full, and measured; its weights are never clipped."""
    study = found.study

    def compute() -> Stage:
        made = whatif.confirm(
            *found.asked_of,
            study.trained,
            found.tokens,
            study.direction,
            found.probe.optimizer,
            text,
            **found.known,
            max_grad_norm=study.max_grad_norm,
            mode=study.mode,
        )
        return Stage(facts={**confirmation_facts(made), "clip_c": None})

    key = ["confirm", text, study.mode, found.tokens_key]
    return dict(found.stage("confirm", key, 30, compute).facts)


def fisher(found: Evaluation) -> Stage:
    """Kernel and cosine [N_E, N_U]; contributions, predicted and measured change at etas[0]."""
    study, eta, centred = found.study, found.study.etas[0], found.study.asked.fisher_centred

    def compute() -> Stage:
        p = study.direction.preconditioner
        assert p is not None  # an AdamW step has one
        check_cosine(p)
        batch = found.probe.update.rollouts
        given = (*found.asked_of, batch, p)
        options = {
            "trained": study.trained,
            "block_bytes": study.block_bytes,
            "microbatch": study.microbatch,
        }
        kernel = fisher_blocks(*given, centred=centred, **options)
        coefficient = found.tokens.coefficient
        # What is centred no longer adds up to the step.
        if not centred and one_per_rollout(coefficient, batch):
            weighed_EN = kernel.value_NM * rollout_coefficients(coefficient, batch).to(
                kernel.value_NM
            )
        else:
            weighed_EN = fisher_blocks(*given, cotangent=coefficient, **options).value_NM
        measured_E = logprob_changes(
            *found.asked_of,
            study.direction.only("gradient"),
            eta,
            base=found.base,
            microbatch=found.probe.measuring["microbatch"],
        )
        return Stage(
            facts={"eta": eta, "centred": centred},
            tensors={
                "kernel_EN": kernel.value_NM,
                "cosine_EN": kernel.cosine_NM,
                "contribution_EN": -eta * study.direction.clip_factor * weighed_EN,
                "measured_E": measured_E.double(),
            },
        )

    key = ["fisher", centred, eta, study.asked.block_mb, found.tokens_key]
    update = 6 * len(found.probe.update.rollouts) / len(found.rollouts)
    return found.stage("fisher", key, 6 + update, compute)
