"""The stages of one evaluation batch that others read: base, matrix, tokens, measured changes.

`ledgers` and `questions` have the rest. A stage that reads another one has that one's key in its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from entropy_experiments.artifacts import digest_of
from entropy_experiments.attribution.finite import finite_columns
from entropy_experiments.attribution.folds import prompt_folds
from entropy_experiments.attribution.matrix import (
    InfluenceMatrix,
    influence_matrix,
    update_directions,
)
from entropy_experiments.attribution.tokens import TokenInfluence, token_influence
from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.estimate.measured import measured
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.pipelines.influence.batches import EvaluationBatch
from entropy_experiments.pipelines.influence.facts import changes
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
from entropy_experiments.results import numbers
from entropy_experiments.types import Params, Scores
from entropy_experiments.types.direction import sum_of

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
        n_e, n_u, asked = len(self.rollouts), len(self.probe.update.rollouts), self.study.asked
        etas = len(self.study.etas)
        rows = asked.measured_rollouts
        measured_rows = len(rows) if isinstance(rows, tuple) else min(rows, n_u)
        singles = 2 * measured_rows * len(self.study.per_sequence_etas)
        rewards = 30 if self.batch.reward_N is not None and asked.reward else 0
        confirmed = 30 * len(asked.what_if) if asked.confirm else 0
        kernel = 6 if asked.fisher else 0
        passes = 1 + 6 + 2 * etas + 12 + 15 + rewards + singles + confirmed + kernel
        update = 3 * self.batch.folds + 3 + 3 * len(asked.leave_one_out) + kernel
        if asked.confirm:
            update += 3 * len(asked.what_if)
        return float(passes * n_e + update * n_u)

    def stage(
        self, name: str, key: Sequence[Any], passes: float, compute: Callable[[], Stage]
    ) -> Stage:
        full = digest_of(self.key, *key)
        return self.study.stage(f"{self.name}_{name}", full, passes * len(self.rollouts), compute)

    @property
    def given(self) -> tuple[Any, ...]:
        """What everything about the whole step takes: both sides, the loss, the direction."""
        study = self.study
        return (*self.asked_of, *study.update_side, study.direction)

    @property
    def asked_of(self) -> tuple[Any, Any]:
        """The policy whose entropy it is, and the rollouts that tell it."""
        return self.study.policy, self.rollouts

    @property
    def known(self) -> dict[str, Any]:
        """What is known at theta already, and how many rollouts fit in a pass with gradient."""
        return {"base": self.base, "microbatch": self.study.microbatch}

    def moved(self, directions: Mapping[str, Params], etas: Sequence[float], **options: Any) -> Any:
        """Changes along several directions, measured: (name, eta) to Estimate."""
        return finite_columns(
            *self.asked_of,
            directions,
            etas,
            microbatch=self.probe.measuring["microbatch"],
            grad_chunk=self.study.asked.grad_chunk_size,
            clip=self.clip,
            base=self.base,
            **options,
        )

    @cached_property
    def _base(self) -> Stage:
        def compute() -> Stage:
            policy, options = self.study.policy, self.probe.measuring
            base = score_all(policy, policy.params, self.rollouts, microbatch=options["microbatch"])
            level = entropy_level(policy, self.rollouts, base=base, repackings=0, **options)
            return Stage(facts={"level": numbers(level)}, tensors=pack_scores(base))

        return self.stage("base", ["base"], 1, compute)

    @cached_property
    def base(self) -> Scores:
        return unpack_scores(self._base)

    @property
    def level(self) -> dict[str, Any]:
        return self._base.facts["level"]

    @property
    def matrix_key(self) -> list[Any]:
        return ["matrix", self.study.asked.block_mb, self.batch.folds]

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
            found = token_influence(
                *self.given,
                **self.known,
                estimand=study.estimand,
                folds=self.batch.folds,
                mode=study.mode,
                scores=study.update_scores,
                gradients=self.matrix.g_K,
            )
            return pack_tokens(found)

        update = 3 * self.batch.folds * len(self.probe.update.rollouts) / len(self.rollouts)
        stage = self.stage("tokens", self.tokens_key, update, compute)
        return unpack_tokens(
            stage, self.probe.update, study.objective, study.direction, study.estimand
        )

    @cached_property
    def matrix(self) -> InfluenceMatrix:
        study = self.study

        def compute() -> Stage:
            found = influence_matrix(
                *self.given,
                **self.known,
                estimand=study.estimand,
                block_bytes=study.block_bytes,
                scores=study.update_scores,
                extra=study.own_lines,
                fold_N=prompt_folds(self.rollouts, self.batch.folds),
            )
            return pack_matrix(found)

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
            lr = study.direction.lr
            step = measured(
                *self.asked_of,
                study.direction,
                lr,
                base=self.base,
                clips=(self.clip,),
                **self.probe.measuring,
            )
            whole = {"full": study.direction.total, "baseline": study.baseline.total}
            found = self.moved(whole, etas, estimand=step.estimand, noise_floor=step.noise_floor)
            kept = changes({f"{name}|{eta!r}": change for (name, eta), change in found.items()})
            own = pack_estimate(found["full", lr])
            return Stage(facts={**kept.facts, **own.facts}, tensors={**kept.tensors, **own.tensors})

        return self.stage("measured", self.measured_key, 2 * len(etas) + 6, compute)

    @property
    def clip(self) -> float | None:
        """Of every measured change's log-weights."""
        return self.study.config.importance.clip_c

    @cached_property
    def measured_rows(self) -> list[int]:
        """Update rollouts whose own directions are measured, in order."""
        asked = self.study.asked.measured_rollouts
        if isinstance(asked, tuple):
            return sorted(set(asked))
        size_N = self.tokens.rollout_N.abs()
        order_N = size_N.argsort(descending=True, stable=True)
        return sorted(order_N[:asked].tolist())

    @cached_property
    def singles(self) -> Stage:
        """Measured along each chosen rollout: `grad|row|eta`, `both|row|eta` (with baseline)."""
        rows, facts, tensors, seconds = self.measured_rows, {}, {}, 0.0
        for start in range(0, len(rows), AT_ONCE):
            found = self._single_stage(start // AT_ONCE, rows[start : start + AT_ONCE])
            facts |= found.facts
            tensors |= found.tensors
            seconds += found.seconds
        return Stage(facts=facts, tensors=tensors, seconds=seconds)

    def _single_stage(self, number: int, rows: list[int]) -> Stage:
        study, etas = self.study, self.single_etas

        def compute() -> Stage:
            stack = update_directions(
                study.trained,
                self.probe.update,
                self.tokens.coefficient,
                study.direction,
                rows=rows,
                microbatch=study.microbatch,
            )
            base_v = study.baseline.total
            directions: dict[str, Params] = {}
            for i, row in enumerate(rows):
                own = {name: value[i] for name, value in stack.items()}
                directions[f"grad|{row}"] = own
                directions[f"both|{row}"] = {
                    name: sum_of((value.to(base_v[name]), base_v[name]))
                    for name, value in own.items()
                }
            found = self.moved(
                directions, etas, estimand=study.estimand, noise_floor=self.noise_floor
            )
            return changes({f"{name}|{eta!r}": change for (name, eta), change in found.items()})

        key = ["rollouts", rows, etas]
        return self.stage(f"rollouts_{number:02d}", key, 2 * len(rows) * len(etas), compute)

    @property
    def single_etas(self) -> tuple[float, ...]:
        reference = (self.study.etas[0],) if self.study.asked.finite else ()
        return tuple(dict.fromkeys((*self.study.per_sequence_etas, *reference)))

    @property
    def noise_floor(self) -> float | None:
        return self.whole.facts[f"full|{self.study.direction.lr!r}"]["noise_floor"]


def evaluations_of(study: Study) -> list[Evaluation]:
    """Every evaluation batch, and the clock told what all of them cost."""
    found = [Evaluation(study, batch) for batch in study.inputs.evaluations]
    study.clock.total = study.cost + sum(evaluation.cost for evaluation in found)
    return found
