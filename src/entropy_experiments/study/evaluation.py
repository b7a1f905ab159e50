"""The stages of one evaluation batch: what the update did to its entropy and its reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.estimate.measured import measured
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.estimate.reward import reward_change
from entropy_experiments.influence import whatif
from entropy_experiments.influence.finite import finite_columns
from entropy_experiments.influence.folds import prompt_folds
from entropy_experiments.influence.leave_one_out import leave_one_out
from entropy_experiments.influence.ledger import entropy_ledger, reward_ledger
from entropy_experiments.influence.matrix import (
    InfluenceMatrix,
    influence_matrix,
    update_directions,
)
from entropy_experiments.influence.tokens import TokenInfluence, token_influence
from entropy_experiments.report.findings import numbers
from entropy_experiments.rollouts.advantages import advantages_by_prompt
from entropy_experiments.study.batches import EvaluationBatch
from entropy_experiments.study.facts import changes, confirmation_facts, ledger_facts
from entropy_experiments.study.packing import (
    pack_estimate,
    pack_matrix,
    pack_scores,
    pack_tokens,
    unpack_estimate,
    unpack_matrix,
    unpack_scores,
    unpack_tokens,
)
from entropy_experiments.study.stages import Study, rollouts_digest
from entropy_experiments.study.store import Stage, digest_of, digest_of_tensors
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
        passes = 1 + 6 + 2 * etas + 12 + 15 + rewards + singles + confirmed
        update = 3 * self.batch.folds + 3 + 3 * len(asked.leave_one_out)
        if asked.confirm:
            update += 3 * len(asked.what_if)
        return float(passes * n_e + update * n_u)

    def stage(
        self, name: str, key: Sequence[Any], passes: float, compute: Callable[[], Stage]
    ) -> Stage:
        full = digest_of(self.key, *key)
        return self.study.stage(f"{self.name}_{name}", full, passes * len(self.rollouts), compute)

    @cached_property
    def _base(self) -> Stage:
        def compute() -> Stage:
            options = self.probe.measuring
            base = score_all(
                self.study.policy,
                self.study.policy.params,
                self.rollouts,
                microbatch=options["microbatch"],
            )
            level = entropy_level(
                self.study.policy, self.rollouts, base=base, repackings=0, **options
            )
            return Stage(facts={"level": numbers(level)}, tensors=pack_scores(base))

        return self.stage("base", ["base"], 1, compute)

    @cached_property
    def base(self) -> Scores:
        return unpack_scores(self._base)

    @property
    def level(self) -> dict[str, Any]:
        return self._base.facts["level"]

    # A stage that reads another one has that one's key in its own.

    @property
    def _matrix_key(self) -> list[Any]:
        return ["matrix", self.study.asked.block_mb, self.batch.folds]

    @property
    def _tokens_key(self) -> list[Any]:
        return ["tokens", self.study.mode, *self._matrix_key]

    @property
    def _measured_key(self) -> list[Any]:
        return ["measured", self.whole_etas]

    @cached_property
    def tokens(self) -> TokenInfluence:
        study = self.study

        def compute() -> Stage:
            found = token_influence(
                study.policy,
                self.rollouts,
                study.trained,
                self.probe.update,
                study.objective,
                study.direction,
                estimand=study.estimand,
                folds=self.batch.folds,
                mode=study.mode,
                microbatch=study.microbatch,
                base=self.base,
                scores=study.update_scores,
                gradients=self.matrix.g_K,
            )
            return pack_tokens(found)

        update = 3 * self.batch.folds * len(self.probe.update.rollouts) / len(self.rollouts)
        stage = self.stage("tokens", self._tokens_key, update, compute)
        return unpack_tokens(
            stage, self.probe.update, study.objective, study.direction, study.estimand
        )

    @cached_property
    def matrix(self) -> InfluenceMatrix:
        study = self.study

        def compute() -> Stage:
            found = influence_matrix(
                study.policy,
                self.rollouts,
                study.trained,
                self.probe.update,
                study.objective,
                study.direction,
                estimand=study.estimand,
                microbatch=study.microbatch,
                block_bytes=study.asked.block_mb << 20,
                base=self.base,
                scores=study.update_scores,
                extra=study.own_lines,
                fold_N=prompt_folds(self.rollouts, self.batch.folds),
            )
            return pack_matrix(found)

        update = 3 * len(self.probe.update.rollouts) / len(self.rollouts)
        stage = self.stage("matrix", self._matrix_key, 6 + update, compute)
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
        study, etas, options = self.study, self.whole_etas, self.probe.measuring

        def compute() -> Stage:
            lr = study.direction.lr
            step = measured(
                study.policy,
                self.rollouts,
                study.direction,
                lr,
                base=self.base,
                clips=(self.clip,),
                **options,
            )
            found = finite_columns(
                study.policy,
                self.rollouts,
                {"full": study.direction.total, "baseline": study.baseline.total},
                etas,
                estimand=step.estimand,
                microbatch=options["microbatch"],
                grad_chunk=study.asked.grad_chunk_size,
                clip=self.clip,
                base=self.base,
                noise_floor=step.noise_floor,
            )
            kept = changes({f"{name}|{eta!r}": change for (name, eta), change in found.items()})
            own = pack_estimate(found["full", lr])
            return Stage(facts={**kept.facts, **own.facts}, tensors={**kept.tensors, **own.tensors})

        return self.stage("measured", self._measured_key, 2 * len(etas) + 6, compute)

    @property
    def clip(self) -> float | None:
        """Of every measured change's log-weights."""
        return self.study.config.importance.clip_c

    @cached_property
    def ledgers(self) -> dict[str, Any]:
        """JSON of both ledgers; the reward's is None where E has no rewards."""
        found = {"entropy": self._entropy_ledger.facts["ledger"], "reward": None}
        if self.study.asked.reward and self.batch.reward_N is not None:
            found["reward"] = self._reward_ledger.facts["ledger"]
        return found

    @cached_property
    def _entropy_ledger(self) -> Stage:
        study = self.study

        def compute() -> Stage:
            found = entropy_ledger(
                study.policy,
                self.rollouts,
                study.trained,
                self.probe.update,
                study.objective,
                study.direction,
                **study.lasting,
                mode=study.mode,
                microbatch=study.microbatch,
                base=self.base,
                lines={
                    name: study.direction.lr * self.matrix.slope(*columns)
                    for name, columns in self.columns_of_lines.items()
                },
                measured=unpack_estimate(self.whole, study.estimand),
                **study.speaks,
            )
            return Stage(facts={"ledger": ledger_facts(found)})

        key = ["ledger", study.mode, study.lasting, self._matrix_key, self._measured_key]
        return self.stage("ledger", key, 12, compute)

    @property
    def columns_of_lines(self) -> Mapping[str, Sequence[int | str]]:
        """Which columns of the matrix each line of the ledger is the sum of."""
        own = {name: [name] for name in self.study.own_lines}
        return {**own, **(self.study.rollouts_by_line or {})}

    @property
    def _reward_lines(self) -> dict[str, Any]:
        """D S along each line: for free where the matrix has it."""
        if self.study.estimand.form != "snis":
            return {"directions": self.study.lines}
        slopes = {
            name: self.matrix.score_slopes(*columns)
            for name, columns in self.columns_of_lines.items()
        }
        return {"score_slopes": slopes}

    @cached_property
    def _reward_ledger(self) -> Stage:
        study = self.study

        def compute() -> Stage:
            found = reward_ledger(
                study.policy,
                self.rollouts,
                self.batch.reward_N,
                study.trained,
                self.probe.update,
                study.objective,
                study.direction,
                **study.lasting,
                mode=study.mode,
                microbatch=study.microbatch,
                horizon=self.probe.horizon,
                base=self.base,
                measured=reward_change(
                    study.policy,
                    self.rollouts,
                    self.batch.reward_N,
                    study.direction,
                    study.direction.lr,
                    horizon=self.probe.horizon,
                    clip=self.clip,
                    microbatch=study.microbatch,
                    base=self.base,
                    repackings=0,
                ),
                **self._reward_lines,
            )
            return Stage(facts={"ledger": ledger_facts(found)})

        key = ["reward", study.mode, study.lasting, self._matrix_key]
        return self.stage("reward", key, 30, compute)

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
            found = finite_columns(
                study.policy,
                self.rollouts,
                directions,
                etas,
                estimand=study.estimand,
                microbatch=self.probe.measuring["microbatch"],
                grad_chunk=study.asked.grad_chunk_size,
                clip=self.clip,
                base=self.base,
                noise_floor=self.noise_floor,
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

    def left_out(self, row: int) -> dict[str, Any]:
        """The step without one rollout, nothing frozen: predicted, against the whole step."""
        study, probe = self.study, self.probe

        def compute() -> Stage:
            found = leave_one_out(
                study.trained,
                probe.update,
                study.objective,
                probe.optimizer,
                row,
                advantage_of=advantages_by_prompt(probe.facts["advantage"]),
                max_grad_norm=probe.facts["max_grad_norm"] or None,
                microbatch=study.microbatch,
            )
            options = {
                "base": self.base,
                "mode": study.mode,
                "microbatch": study.microbatch,
                "repackings": 0,
                **study.speaks,
            }
            lr, e = study.direction.lr, (study.policy, self.rollouts)
            with_it = lr * first_order(*e, study.direction, **options)
            without = lr * first_order(*e, found.direction, **options)
            seen = measured(
                *e,
                found.direction,
                lr,
                base=self.base,
                clips=(self.clip,),
                repackings=0,
                **probe.measuring,
            )
            return Stage(
                facts={
                    "rollout": row,
                    "label": found.label,
                    "influence": float(self.tokens.rollout_N[row]),
                    "first_order": numbers(without),
                    "measured": numbers(seen),
                    "difference": numbers(with_it - without),
                    "clip_factor": found.direction.clip_factor,
                }
            )

        key = ["without", row, study.mode, probe.facts["advantage"], self._tokens_key]
        return dict(self.stage(f"without_{row:03d}", key, 9, compute).facts)

    def confirmed(self, text: str) -> dict[str, Any]:
        """The counterfactual step made in full, and measured; its weights are never clipped."""
        study, probe = self.study, self.probe

        def compute() -> Stage:
            found = whatif.confirm(
                study.policy,
                self.rollouts,
                study.trained,
                self.tokens,
                study.direction,
                probe.optimizer,
                text,
                max_grad_norm=probe.facts["max_grad_norm"] or None,
                mode=study.mode,
                microbatch=study.microbatch,
                base=self.base,
            )
            return Stage(facts={**confirmation_facts(found), "clip_c": None})

        key = ["confirm", text, study.mode, self._tokens_key]
        return dict(self.stage("confirm", key, 30, compute).facts)


def evaluations_of(study: Study) -> list[Evaluation]:
    """Every evaluation batch, and the clock told what all of them cost."""
    found = [Evaluation(study, batch) for batch in study.inputs.evaluations]
    study.clock.total = study.cost + sum(evaluation.cost for evaluation in found)
    return found
