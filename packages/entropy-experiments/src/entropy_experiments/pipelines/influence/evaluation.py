"""The stages of one evaluation batch that others read: base, matrix, tokens, measured changes.

`ledgers` and `questions` have the rest. A stage that reads another one has that one's key in its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from entropy_experiments.artifacts import digest_of
from entropy_experiments.attribution.matrix import InfluenceMatrix
from entropy_experiments.attribution.step import (
    FULL,
    measure_rollouts,
    measure_step,
    most_influential,
    pair_matrix,
    score_evaluation,
    token_influences,
)
from entropy_experiments.attribution.tokens import TokenInfluence
from entropy_experiments.pipelines.influence.batches import EvaluationBatch
from entropy_experiments.pipelines.influence.packing import (
    pack_estimate,
    pack_matrix,
    pack_scores,
    pack_tokens,
    unpack_matrix,
    unpack_scores,
    unpack_tokens,
)
from entropy_experiments.pipelines.influence.stages import Study, rollouts_digest
from entropy_experiments.pipelines.influence.store import Stage, digest_of_tensors
from entropy_experiments.pipelines.influence.summary_json import changes
from entropy_experiments.results import numbers
from entropy_experiments.types import Scores

AT_ONCE = 4
"""Update rollouts whose directions are measured in one stage: what a kill can cost."""


class Evaluation:
    """One evaluation batch of a study."""

    def __init__(self, study: Study, batch: EvaluationBatch) -> None:
        self.study, self.batch = study, batch
        self.name, self.rollouts = batch.name, batch.rollouts
        self.probe = study.inputs.of(batch)

    @cached_property
    def key(self) -> str:
        rewards = digest_of_tensors({"reward": self.batch.reward_N})
        return digest_of(self.study.key, rollouts_digest(self.rollouts), rewards)

    @property
    def cost(self) -> float:
        """Rollouts through the model: a forward is 1, a backward or a derivative 2 more."""
        n_e, n_u, influence = len(self.rollouts), len(self.probe.update.rollouts), self.study.asked
        etas = len(self.study.etas)
        rows = influence.measured_rollouts
        measured_rows = len(rows) if isinstance(rows, tuple) else min(rows, n_u)
        singles = 2 * measured_rows * len(self.study.per_sequence_etas)
        rewards = 30 if self.batch.reward_N is not None and influence.reward else 0
        confirmed = 30 * len(influence.what_if) if influence.confirm else 0
        kernel = 6 if influence.fisher else 0
        passes = 1 + 6 + 2 * etas + 12 + 15 + rewards + singles + confirmed + kernel
        update = 3 * self.batch.folds + 3 + 3 * len(influence.leave_one_out) + kernel
        if influence.confirm:
            update += 3 * len(influence.what_if)
        return float(passes * n_e + update * n_u)

    def stage(
        self, name: str, key: Sequence[Any], passes: float, compute: Callable[[], Stage]
    ) -> Stage:
        full = digest_of(self.key, *key)
        return self.study.stage(f"{self.name}_{name}", full, passes * len(self.rollouts), compute)

    @cached_property
    def _base(self) -> Stage:
        def compute() -> Stage:
            step = self.study.step
            base = score_evaluation(step.policy, self.rollouts, step.estimator)
            return Stage(facts={"level": numbers(base.level)}, tensors=pack_scores(base.scores))

        return self.stage("base", ["base"], 1, compute)

    @cached_property
    def base(self) -> Scores:
        return unpack_scores(self._base)

    @property
    def level(self) -> dict[str, Any]:
        return self._base.facts["level"]

    @property
    def matrix_key(self) -> list[Any]:
        return ["matrix", self.study.asked.gradient_block_mb, self.batch.folds]

    @property
    def tokens_key(self) -> list[Any]:
        return ["tokens", self.study.mode, *self.matrix_key]

    @property
    def measured_key(self) -> list[Any]:
        return ["measured", self.whole_etas]

    @cached_property
    def tokens(self) -> TokenInfluence:
        study = self.study

        def compute() -> Stage:
            tokens = token_influences(
                study.step,
                study.rebuilt,
                self.rollouts,
                self.base,
                self.matrix,
                folds=self.batch.folds,
            )
            return pack_tokens(tokens)

        update = 3 * self.batch.folds * len(self.probe.update.rollouts) / len(self.rollouts)
        stage = self.stage("tokens", self.tokens_key, update, compute)
        return unpack_tokens(
            stage, self.probe.update, study.objective, study.direction, study.estimand
        )

    @cached_property
    def matrix(self) -> InfluenceMatrix:
        study = self.study

        def compute() -> Stage:
            matrix = pair_matrix(
                study.step,
                study.rebuilt,
                self.rollouts,
                self.base,
                study.columns,
                folds=self.batch.folds,
            )
            return pack_matrix(matrix)

        update = 3 * len(self.probe.update.rollouts) / len(self.rollouts)
        stage = self.stage("matrix", self.matrix_key, 6 + update, compute)
        return unpack_matrix(stage, self.rollouts, study.estimand, study.direction.lr, study.device)

    @property
    def whole_etas(self) -> tuple[float, ...]:
        study = self.study
        return tuple(dict.fromkeys((*study.etas, *study.per_sequence_etas, study.direction.lr)))

    @cached_property
    def whole(self) -> Stage:
        """Measured along the step and along its baseline: `full|eta` and `baseline|eta`.

        The step's own change, at the learning rate, is kept whole: the ledger explains it.
        """
        study, etas = self.study, self.whole_etas

        def compute() -> Stage:
            measured = measure_step(study.step, study.rebuilt, self.rollouts, self.base, etas)
            kept, own = changes(measured), pack_estimate(measured[FULL, study.direction.lr])
            return Stage(facts={**kept.facts, **own.facts}, tensors={**kept.tensors, **own.tensors})

        return self.stage("measured", self.measured_key, 2 * len(etas) + 6, compute)

    @cached_property
    def measured_rows(self) -> list[int]:
        """Update rollouts whose own directions are measured, in order."""
        rows = self.study.asked.measured_rollouts
        return sorted(set(rows)) if isinstance(rows, tuple) else most_influential(self.tokens, rows)

    @cached_property
    def singles(self) -> Stage:
        """Measured along each chosen rollout: `grad|row|eta`, `both|row|eta` (with baseline)."""
        rows, facts, tensors, seconds = self.measured_rows, {}, {}, 0.0
        for start in range(0, len(rows), AT_ONCE):
            stage = self._single_stage(start // AT_ONCE, rows[start : start + AT_ONCE])
            facts |= stage.facts
            tensors |= stage.tensors
            seconds += stage.seconds
        return Stage(facts=facts, tensors=tensors, seconds=seconds)

    def _single_stage(self, number: int, rows: list[int]) -> Stage:
        study, etas = self.study, self.single_etas

        def compute() -> Stage:
            measured = measure_rollouts(
                study.step,
                study.rebuilt,
                self.rollouts,
                self.base,
                self.tokens.coefficient,
                rows,
                etas,
                noise_floor=self.noise_floor,
            )
            return changes(measured)

        key = ["rollouts", rows, etas]
        return self.stage(f"rollouts_{number:02d}", key, 2 * len(rows) * len(etas), compute)

    @property
    def single_etas(self) -> tuple[float, ...]:
        reference = (self.study.etas[0],) if self.study.asked.measured_matrix else ()
        return tuple(dict.fromkeys((*self.study.per_sequence_etas, *reference)))

    @property
    def noise_floor(self) -> float | None:
        return self.whole.facts[f"full|{self.study.direction.lr!r}"]["noise_floor"]


def evaluations_of(study: Study) -> list[Evaluation]:
    """Every evaluation batch, and the clock told what all of them cost."""
    evaluations = [Evaluation(study, batch) for batch in study.inputs.evaluations]
    study.clock.total = study.cost + sum(evaluation.cost for evaluation in evaluations)
    return evaluations
