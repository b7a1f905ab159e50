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

Later stages read earlier ones from disk, whether this process computed them or another did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch

from entropy_experiments.artifacts import digest_of
from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.attribution.interventions import Place, Reweighted
from entropy_experiments.attribution.step import (
    LineColumns,
    RebuiltStep,
    StepInputs,
    StepOptions,
    line_columns,
    rebuild_step,
)
from entropy_experiments.attribution.terms import line_directions, rollouts_by_line
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.estimate.modes import Used, used_forward_mode
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.numerics.derivatives import How
from entropy_experiments.pipelines.influence.batches import StudyInputs
from entropy_experiments.pipelines.influence.certified import certified_step
from entropy_experiments.pipelines.influence.clock import Clock
from entropy_experiments.pipelines.influence.packing import (
    pack_step,
    packed,
    unpack_step,
    unpacked,
)
from entropy_experiments.pipelines.influence.store import (
    Stage,
    StageStore,
    batch_digest,
    digest_of_tensors,
)
from entropy_experiments.results import INFLUENCE
from entropy_experiments.types import (
    Direction,
    Estimand,
    Params,
    Rollouts,
)


class Study:
    """One update batch and its evaluation batches; properties compute what is not on disk."""

    def __init__(
        self, inputs: StudyInputs, store: StageStore, *, say: Callable[[str], None] | None = None
    ) -> None:
        self.inputs, self.store = inputs, store
        self.probe, self.config = inputs.probe, inputs.probe.config
        self.asked = self.config.influence
        self.clock = Clock(say=say)
        self.timings: dict[str, float] = {}
        self.policy = self.probe.policy
        self.trained = self.probe.trained.as_trained()
        self.objective = self.probe.facts.objective
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
        )

    def stage(self, name: str, key: str, cost: float, compute: Callable[[], Stage]) -> Stage:
        stored = self.store.holds(name, key)
        stage = self.store.once(name, key, compute)
        self.timings[name] = self.timings.get(name, 0.0) + stage.seconds
        self.clock.tell(name, cost, stage.seconds, found=stored)
        return stage

    @property
    def cost(self) -> float:
        return 6.0 * len(self.probe.update.rollouts)

    @cached_property
    def step_stage(self) -> Stage:
        def compute() -> Stage:
            rebuilt, gradient = rebuild_step(self.step)
            certified = certified_step(self.probe, rebuilt.direction, gradient)
            return pack_step(rebuilt, {"certified": certified})

        return self.stage("step", digest_of(self.key), self.cost / 2, compute)

    @cached_property
    def rebuilt(self) -> RebuiltStep:
        return unpack_step(self.step_stage, self.device)

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

        def compute() -> Stage:
            lines = line_directions(
                self.trained,
                self.probe.update,
                self.objective,
                self.direction,
                microbatch=self.probe.estimator.microbatch,
            )
            return Stage(facts={"names": list(lines)}, tensors=packed(lines))

        stage = self.stage("lines", digest_of(self.key), self.cost / 2, compute)
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
