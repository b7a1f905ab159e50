"""Both ledgers of an evaluation batch: what changed its entropy, and its expected reward."""

from __future__ import annotations

from typing import Any

from entropy_experiments.attribution.step import close_ledger, close_reward_ledger
from entropy_experiments.pipelines.influence.evaluation import Evaluation
from entropy_experiments.pipelines.influence.packing import unpack_estimate
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.pipelines.influence.summary_json import ledger_json


def ledgers(evaluation: Evaluation) -> dict[str, Any]:
    """JSON of both; the reward's is None where E has no rewards."""
    both = {"entropy": entropy_stage(evaluation).facts["ledger"], "reward": None}
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
