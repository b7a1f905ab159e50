"""The stages of an influence study, each computed once and found again by its key.

    step            the optimizer step and the update rollouts' scores
    lines           the step as momentum, decay and one direction per term of the loss
  and for every evaluation batch
    base            scores and entropy before the step
    matrix          every pair of rollouts; ledger lines ride along, and g_H by fold
    tokens          the influence of every update token
    measured        the change along the whole step and along its baseline, at every eta
    ledger, reward  what changed the entropy, and the expected reward
    rollouts_NN     measured changes along single rollouts' directions, a few per stage
    without_NNN     exact leave-one-out of a rollout
    confirm         a counterfactual step, made and measured
    fisher          the kernel of every pair of rollouts, and the log-prob changes it predicts

A model cut over the ranks (`checkpoint.sharding`) has no gradients of single rollouts in one pass,
hence neither matrix nor Fisher kernel (`influence.sharded`). What is as large as the model, the
step and its lines, is then kept in memory and not on disk: a study that was killed makes it again.

Later stages read earlier ones from disk, whether this process computed them or another did.

Progress is a bar on a terminal, else lines. Time left = (rollouts still to pass through the model)
x (seconds per rollout so far). A stage that was found on disk counts with the seconds that it took
when it was made.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from entropy_experiments.artifacts import digest_of
from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.attribution.interventions import Place, Reweighted
from entropy_experiments.attribution.matrix import InfluenceMatrix
from entropy_experiments.attribution.step import (
    FULL,
    LineColumns,
    RebuiltStep,
    StepInputs,
    StepOptions,
    line_columns,
    line_slopes,
    lines_of_matrix,
    measure_rollouts,
    measure_step,
    most_influential,
    pair_matrix,
    rebuild_step,
    score_evaluation,
    token_influences,
)
from entropy_experiments.attribution.terms import line_directions, rollouts_by_line
from entropy_experiments.attribution.tokens import TokenInfluence
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.estimate.modes import Used, cut_over_ranks, used_forward_mode
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.numerics.derivatives import How
from entropy_experiments.pipelines.influence.batches import EvaluationBatch, StudyInputs
from entropy_experiments.pipelines.influence.certified import certified_step
from entropy_experiments.pipelines.influence.earlier_steps import EarlierSteps, steps_of_study
from entropy_experiments.pipelines.influence.packing import (
    pack_estimate,
    pack_matrix,
    pack_params,
    pack_scores,
    pack_step,
    pack_tokens,
    unpack_matrix,
    unpack_scores,
    unpack_step,
    unpack_tokens,
    unpacked,
)
from entropy_experiments.pipelines.influence.store import (
    Stage,
    StageStore,
    batch_digest,
    digest_of_tensors,
)
from entropy_experiments.pipelines.influence.summary_json import changes
from entropy_experiments.results import INFLUENCE, EstimateResult, numbers
from entropy_experiments.types import (
    Direction,
    Estimand,
    Estimate,
    Params,
    Rollouts,
    Scores,
)

WORDS = {
    "step": "the optimizer step",
    "lines": "the step by lines of the ledger",
    "base": "entropy before the step",
    "matrix": "every pair of rollouts",
    "tokens": "influence of every token",
    "measured": "changes measured along the step",
    "ledger": "ledger of the entropy",
    "reward": "ledger of the reward",
    "rollouts": "changes measured along single rollouts, part {}",
    "without": "the step without rollout {}",
    "confirm": "a what-if's step, made and measured",
    "fisher": "Fisher kernel",
    "momentum": "momentum by the batches it came from",
}
_NAME = re.compile(r"(?:(eval_\d+)_)?([a-z]+)(?:_(\d+))?")
AT_ONCE = 4
"""Update rollouts whose directions are measured in one stage: what a kill can cost."""


def in_words(name: str) -> str:
    """A stage's name as people would say it: eval_00_rollouts_01, measured along ..., part 2."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    batch, kind, number = match.groups()
    assert kind in WORDS, name
    # Parts are counted from 1; rollouts have their own numbers, which begin with 0.
    said = WORDS[kind].format(int(number or 0) + (kind == "rollouts"))
    return said if batch is None else f"{batch}, {said}"


@dataclass(kw_only=True)
class Clock:
    """Says what is done and how long the rest may take, by the passes that stages cost."""

    say: Callable[[str], None] | None
    total: float = 0.0
    """Rollouts that all planned stages pass through the model, forward and back."""
    done: float = 0.0
    seconds: float = 0.0
    _bar: Any = None
    _task: Any = None

    def tell(self, name: str, cost: float, seconds: float, *, found: bool) -> None:
        self.done += cost
        self.seconds += seconds
        if self.say is None:
            return
        left = max(self.total - self.done, 0.0) * self.seconds / self.done if self.done else 0.0
        rest = f", about {left:.0f} s left" if left >= 1 else ""
        what = "kept from before" if found else f"{seconds:.1f} s"
        share = min(self.done / max(self.total, 1), 1)
        if not sys.stderr.isatty():
            self.say(f"{in_words(name)}: {what} ({share:.0%}{rest})")
            return
        if self._bar is None:
            self._bar, self._task = _open_bar()
        self._bar.update(
            self._task, completed=share, description=f"{in_words(name)}: {what}", rest=rest
        )

    def close(self) -> None:
        """Leave the terminal as it was; the last state of the bar stays on it."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _open_bar() -> tuple[Any, Any]:
    from rich import progress as rich
    from rich.console import Console

    bar = rich.Progress(
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TextColumn("{task.description}{task.fields[rest]}", markup=False),
        console=Console(stderr=True),
    )
    bar.start()
    return bar, bar.add_task("", total=1.0, rest="")


class Study:
    """One update batch and its evaluation batches; properties compute what is not on disk."""

    def __init__(
        self,
        inputs: StudyInputs,
        store: StageStore,
        *,
        say: Callable[[str], None] | None = None,
        momentum_batches: int | None = None,
    ) -> None:
        self.inputs, self.store = inputs, store
        self.momentum_batches = momentum_batches
        self.probe, self.config = inputs.probe, inputs.probe.config
        self.asked = self.config.influence
        self.clock = Clock(say=say)
        self.timings: dict[str, float] = {}
        self.policy = self.probe.policy
        self.trained = self.probe.trained.as_trained()
        self.objective = self.probe.facts.objective
        self.sharded = cut_over_ranks(self.policy)
        self._step_in_memory: RebuiltStep | None = None
        self._check_indices()

    def _check_indices(self) -> None:
        """A rollout that is not in U is refused here, before anything is computed."""
        rollouts, rows = self.probe.update.rollouts, self.asked.measured_rollouts
        count = len(rollouts)
        for name, indices in (
            ("measured_rollouts", rows if isinstance(rows, tuple) else ()),
            ("leave_one_out", self.asked.leave_one_out),
        ):
            beyond = [row for row in indices if not 0 <= row < count]
            if beyond:
                raise ValueError(
                    f"influence.{name} has {beyond[:5]}; the update batch has rollouts 0 to "
                    f"{count - 1}."
                )
        for text in self.asked.what_if:
            for place in named_places(text):
                tokens = int(rollouts.tokens_N[place.rollout]) if place.rollout < count else 0
                if place.rollout >= count or (place.k is not None and place.k >= tokens):
                    end = f"its response tokens 0 to {tokens - 1}" if tokens else "no such one"
                    raise ValueError(
                        f"The what-if {text!r} names {place}; the update batch has rollouts 0 to "
                        f"{count - 1}, and of rollout {place.rollout} {end}."
                    )

    @property
    def step(self) -> StepInputs:
        """What the stages of `attribution.step` take."""
        return StepInputs(
            policy=self.policy,
            trained=self.trained,
            batch=self.probe.update,
            optimizer=self.probe.optimizer,
            options=StepOptions(
                objective=self.objective,
                max_grad_norm=self.probe.facts["max_grad_norm"] or None,
                estimator=replace(self.probe.estimator, mode=self.mode),
                block_bytes=self.asked.gradient_block_mb << 20,
                clip=self.config.measure.clip_log_weights,
                grad_chunk=self.asked.directions_per_pass,
            ),
        )

    @property
    def mode(self) -> How:
        """Of every derivative along a direction. g_H itself is always one backward."""
        method = self.probe.estimator.mode
        mode = "auto" if method == "reverse" else method
        return used_forward_mode(self.policy, self.probe.evaluation, mode)

    @property
    def estimand(self) -> Estimand:
        return self.probe.estimator.estimand(self.policy)

    @cached_property
    def lasting(self) -> dict[str, float | bool]:
        """How long lines of the ledger act, as keys of stages have it."""
        b1, coupled = momentum_of(self.probe.optimizer)
        return {"momentum_decay": b1, "coupled_decay": coupled}

    @cached_property
    def earlier_steps(self) -> EarlierSteps | None:
        """Whose batches hold this step's momentum; a ValueError says why it stays one line."""
        rollouts = len(self.probe.update.rollouts)
        others = sum(Evaluation(self, batch).cost for batch in self.inputs.evaluations)
        return steps_of_study(self.probe, self.momentum_batches, 6 + others / rollouts)

    @property
    def etas(self) -> tuple[float, ...]:
        return self.asked.learning_rates or (self.probe.lr,)

    @property
    def per_sequence_etas(self) -> tuple[float, ...]:
        return self.asked.rollout_learning_rates or self.etas

    @cached_property
    def key(self) -> str:
        """All that the update side of every stage depends on."""
        batch, probe = self.probe.update, self.probe
        return digest_of(
            INFLUENCE.version,
            {name: value for name, value in provenance().items() if name != "git"},
            self.inputs.identity,
            dict(probe.checkpoint.hashes),
            asdict(self.objective),
            [
                *(probe.facts["max_grad_norm"], probe.lr, self.trained.temperature),
                probe.estimator.microbatch,
            ],
            [*_keyed(probe.estimator, probe.mode), self.config.measure.clip_log_weights],
            rollouts_digest(batch.rollouts),
            batch_digest(batch),
            *(["sharded"] if self.sharded else []),
        )

    def stage(self, name: str, key: str, cost: float, compute: Callable[[], Stage]) -> Stage:
        stored = self.store.holds(name, key)
        stage = self.store.once(name, key, compute)
        self.timings[name] = self.timings.get(name, 0.0) + stage.seconds
        self.clock.tell(name, cost, stage.seconds, found=stored)
        return stage

    @property
    def cost(self) -> float:
        return (6.0 + self._momentum_passes) * len(self.probe.update.rollouts)

    @property
    def _momentum_passes(self) -> int:
        try:
            earlier = None if self.momentum_batches == 0 else self.earlier_steps
        except (ValueError, OSError):
            return 0
        return 0 if earlier is None else earlier.passes

    @property
    def step_cost(self) -> float:
        return 3.0 * len(self.probe.update.rollouts)

    @cached_property
    def step_stage(self) -> Stage:
        def compute() -> Stage:
            rebuilt, gradient = rebuild_step(self.step)
            certified = certified_step(self.probe, rebuilt.direction, gradient)
            if self.sharded:
                self._step_in_memory = rebuilt
            return pack_step(rebuilt, certified)

        return self.stage("step", digest_of(self.key), self.step_cost, compute)

    @cached_property
    def rebuilt(self) -> RebuiltStep:
        stage = self.step_stage
        if not self.sharded:
            return unpack_step(stage, self.device)
        rebuilt = self._step_in_memory or rebuild_step(self.step)[0]
        return replace(rebuilt, scores=unpack_scores(stage))

    @property
    def direction(self) -> Direction:
        return self.rebuilt.direction

    @cached_property
    def columns(self) -> LineColumns:
        """How the ledger's lines are read off the matrix."""
        by_line = rollouts_by_line(self.objective, self.rebuilt.scores, self.probe.update)
        return line_columns(self.direction, by_line, lambda: self.lines)

    @cached_property
    def lines(self) -> Mapping[str, Params]:
        """The step's parts and lines by name; they sum to the whole direction."""

        def directions() -> Mapping[str, Params]:
            return line_directions(
                self.trained,
                self.probe.update,
                self.objective,
                self.direction,
                microbatch=self.probe.estimator.microbatch,
                scores=self.rebuilt.scores,
            )

        if self.sharded:
            return directions()

        def compute() -> Stage:
            lines = directions()
            return Stage(facts={"names": list(lines)}, tensors=pack_params(lines))

        stage = self.stage("lines", digest_of(self.key), self.step_cost, compute)
        found = unpacked(stage.tensors, stage.facts["names"])
        return {
            name: {key: value.to(self.device) for key, value in line.items()}
            for name, line in found.items()
        }

    @property
    def device(self) -> torch.device:
        return next(iter(self.policy.params.values())).device


def _keyed(options: EstimatorOptions, mode: Used) -> list[dict[str, Any]]:
    """Options of measurements and of slopes, as keys of stages have always had them.

    Other words here, and no stage of a study that was interrupted would be found again.
    """
    measuring = {
        "form": options.form,
        "unit": options.unit,
        "entropy": options.entropy,
        "horizon": options.horizon,
        "microbatch": options.forward_size,
    }
    slopes = {"form": options.slope_form, "microbatch": options.microbatch, "mode": mode}
    return [measuring, {**measuring, **slopes}]


def named_places(text: str) -> list[Place]:
    """Rollouts and tokens that a what-if names by number."""
    return [
        target
        for one in whatif.parse(text)
        if isinstance(one, Reweighted)
        for target, _ in one.factors
        if isinstance(target, Place)
    ]


def rollouts_digest(rollouts: Rollouts) -> str:
    columns = {"weight": rollouts.weight_N, "behaviour": rollouts.behaviour_logprob_NS}
    return digest_of(
        rollouts.fingerprint, list(rollouts.tokens_NS.shape), digest_of_tensors(columns)
    )


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
    def level(self) -> EstimateResult:
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
                None if self.matrix is None else self.matrix.g_K,
                folds=self.batch.folds,
            )
            return pack_tokens(tokens)

        update = 3 * self.batch.folds * len(self.probe.update.rollouts) / len(self.rollouts)
        stage = self.stage("tokens", self.tokens_key, update, compute)
        return unpack_tokens(
            stage, self.probe.update, study.objective, study.direction, study.estimand
        )

    @cached_property
    def matrix(self) -> InfluenceMatrix | None:
        """None of a model cut over the ranks."""
        study = self.study
        if study.sharded:
            return None

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

    def lines(self) -> Mapping[str, Estimate]:
        """The ledger's lines in nats of the step."""
        study = self.study
        if self.matrix is not None:
            return lines_of_matrix(study.rebuilt, study.columns, self.matrix)
        return line_slopes(study.step, study.rebuilt, self.rollouts, self.base, study.lines)

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
