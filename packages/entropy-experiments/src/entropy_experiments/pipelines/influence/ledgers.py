"""Both ledgers of an evaluation batch: who moved its entropy, and who its expected reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from entropy_experiments.attribution.ledger import entropy_ledger, reward_ledger
from entropy_experiments.estimate.reward import reward_change
from entropy_experiments.pipelines.influence.evaluation import Evaluation
from entropy_experiments.pipelines.influence.facts import ledger_facts
from entropy_experiments.pipelines.influence.packing import unpack_estimate
from entropy_experiments.pipelines.influence.store import Stage


def ledgers(found: Evaluation) -> dict[str, Any]:
    """JSON of both; the reward's is None where E has no rewards."""
    told = {"entropy": entropy_stage(found).facts["ledger"], "reward": None}
    if found.study.asked.reward and found.batch.reward_N is not None:
        told["reward"] = reward_stage(found).facts["ledger"]
    return told


def entropy_stage(found: Evaluation) -> Stage:
    study = found.study

    def compute() -> Stage:
        ledger = entropy_ledger(
            *found.given,
            **found.known,
            **study.lasting,
            **study.speaks,
            mode=study.mode,
            lines={
                name: study.direction.lr * found.matrix.slope(*columns)
                for name, columns in _columns_of_lines(found).items()
            },
            measured=unpack_estimate(found.whole, study.estimand),
        )
        return Stage(facts={"ledger": ledger_facts(ledger)})

    key = ["ledger", study.mode, study.lasting, found.matrix_key, found.measured_key]
    return found.stage("ledger", key, 12, compute)


def reward_stage(found: Evaluation) -> Stage:
    study, reward_N = found.study, found.batch.reward_N

    def compute() -> Stage:
        policy, rollouts, *others = found.given
        options = {**found.known, "horizon": found.probe.horizon}
        ledger = reward_ledger(
            policy,
            rollouts,
            reward_N,
            *others,
            **options,
            **study.lasting,
            **_reward_lines(found),
            mode=study.mode,
            measured=reward_change(
                policy,
                rollouts,
                reward_N,
                study.direction,
                study.direction.lr,
                **options,
                clip=found.clip,
                repackings=0,
            ),
        )
        return Stage(facts={"ledger": ledger_facts(ledger)})

    key = ["reward", study.mode, study.lasting, found.matrix_key]
    return found.stage("reward", key, 30, compute)


def _columns_of_lines(found: Evaluation) -> Mapping[str, Sequence[int | str]]:
    """Which columns of the matrix each line of the ledger is the sum of."""
    own = {name: [name] for name in found.study.own_lines}
    return {**own, **(found.study.rollouts_by_line or {})}


def _reward_lines(found: Evaluation) -> dict[str, Any]:
    """D S along each line: for free where the matrix has it."""
    if found.study.estimand.form != "snis":
        return {"directions": found.study.lines}
    slopes = {
        name: found.matrix.score_slopes(*columns)
        for name, columns in _columns_of_lines(found).items()
    }
    return {"score_slopes": slopes}
