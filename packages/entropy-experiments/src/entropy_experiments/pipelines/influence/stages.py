"""The stages of an influence study, each computed once and found again by its key.

    step            the optimizer step and the update rollouts' scores
    lines           the step as momentum, decay and one direction per term of the loss
  and for every evaluation batch
    base            scores and entropy before the step
    matrix          every pair of rollouts; ledger lines ride along, and g_H by fold
    tokens          the influence of every update token
    measured        the change along the whole step and along its baseline, at every eta
    ledger, reward  who moved the entropy, and the expected reward
    rollouts_NN     measured changes along single rollouts' directions, a few per stage
    without_NNN     exact leave-one-out of a rollout
    confirm         a counterfactual step, made and measured
    fisher          the kernel of every pair of rollouts, and the log-prob changes it predicts

Later stages read earlier ones from disk, whether this process computed them or another did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from entropy_experiments.artifacts import digest_of
from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.attribution.interventions import Place, Reweighted
from entropy_experiments.attribution.terms import line_directions, rollouts_by_line
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.estimate.first_order import slope_estimand
from entropy_experiments.estimate.modes import used_forward_mode
from entropy_experiments.numerics.derivatives import How
from entropy_experiments.pipelines.influence.batches import StudyInputs
from entropy_experiments.pipelines.influence.certified import certified_step
from entropy_experiments.pipelines.influence.clock import Clock
from entropy_experiments.pipelines.influence.packing import (
    pack_direction,
    packed,
    unpack_direction,
    unpack_scores,
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
    Scores,
    UpdateBatch,
)
from entropy_experiments.types.direction import BASELINE_PARTS


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
        for name, asked in (
            ("measured_rollouts", rows if isinstance(rows, tuple) else ()),
            ("leave_one_out", self.asked.leave_one_out),
        ):
            beyond = [row for row in asked if not 0 <= row < count]
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
    def microbatch(self) -> int:
        return self.config.memory_config.microbatch_size

    @property
    def block_bytes(self) -> int:
        return self.asked.block_mb << 20

    @property
    def max_grad_norm(self) -> float | None:
        return self.probe.facts["max_grad_norm"] or None

    @property
    def update_side(self) -> tuple[Any, UpdateBatch, Any]:
        """The policy as the loss sees it, the batch, the loss."""
        return self.trained, self.probe.update, self.objective

    @property
    def mode(self) -> How:
        """Of every derivative along a direction. g_H itself is always one backward."""
        method = self.config.approx_delta_h.method
        asked = "auto" if method == "reverse" else method
        return used_forward_mode(self.policy, self.probe.evaluation, asked)

    @property
    def speaks(self) -> dict[str, Any]:
        """What every slope speaks of: options of `slope_estimand`."""
        keep = ("form", "unit", "entropy", "horizon")
        return {name: value for name, value in self.probe.predicting.items() if name in keep}

    @property
    def estimand(self) -> Estimand:
        return slope_estimand(self.policy, **self.speaks)

    @cached_property
    def lasting(self) -> dict[str, Any]:
        """How long lines of the ledger act: options `momentum_decay` and `coupled_decay`."""
        b1, coupled = momentum_of(self.probe.optimizer)
        return {"momentum_decay": b1, "coupled_decay": coupled}

    @property
    def etas(self) -> tuple[float, ...]:
        return self.asked.etas or (self.probe.lr,)

    @property
    def per_sequence_etas(self) -> tuple[float, ...]:
        return self.asked.per_sequence_etas or self.etas

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
            [probe.facts["max_grad_norm"], probe.lr, self.trained.temperature, self.microbatch],
            [probe.measuring, probe.predicting, self.config.importance.clip_c],
            rollouts_digest(batch.rollouts),
            batch_digest(batch),
        )

    def stage(self, name: str, key: str, cost: float, compute: Callable[[], Stage]) -> Stage:
        found = self.store.holds(name, key)
        stage = self.store.once(name, key, compute)
        self.timings[name] = self.timings.get(name, 0.0) + stage.seconds
        self.clock.tell(name, cost, stage.seconds, found=found)
        return stage

    @property
    def cost(self) -> float:
        return 6.0 * len(self.probe.update.rollouts)

    @cached_property
    def step_stage(self) -> Stage:
        def compute() -> Stage:
            direction, stats = self.probe.step(of_batch=True)
            certified = certified_step(self.probe, direction, stats)
            norms = {
                **stats.part_norms,
                "grad_norm": stats.grad_norm,
                "clipped_norm": stats.clipped_norm,
            }
            facts = {"norms": norms, "loss": stats.loss, "precision": dict(stats.precision)}
            facts["certified"] = certified
            return pack_direction(direction, stats.found.scores, facts)

        return self.stage("step", digest_of(self.key), self.cost / 2, compute)

    @cached_property
    def direction(self) -> Direction:
        return unpack_direction(self.step_stage, self.device)

    @cached_property
    def update_scores(self) -> Scores:
        return unpack_scores(self.step_stage)

    @cached_property
    def rollouts_by_line(self) -> dict[str, list[int]] | None:
        """Where no rollout is in two lines of the ledger, a line is a sum of rollouts."""
        return rollouts_by_line(self.objective, self.update_scores, self.probe.update)

    @property
    def own_lines(self) -> Mapping[str, Params]:
        """Lines that are no sums of update rollouts, hence columns of the matrix themselves."""
        return self.lines if self.rollouts_by_line is None else self.baseline.parts

    @cached_property
    def lines(self) -> Mapping[str, Params]:
        """The step's parts and lines by name; they sum to the whole direction."""

        def compute() -> Stage:
            found = line_directions(*self.update_side, self.direction, microbatch=self.microbatch)
            return Stage(facts={"names": list(found)}, tensors=packed(found))

        stage = self.stage("lines", digest_of(self.key), self.cost / 2, compute)
        found = unpacked(stage.tensors, stage.facts["names"])
        return {
            name: {key: value.to(self.device) for key, value in line.items()}
            for name, line in found.items()
        }

    @property
    def device(self) -> torch.device:
        return next(iter(self.policy.params.values())).device

    @cached_property
    def baseline(self) -> Direction:
        return self.direction.only(*(p for p in BASELINE_PARTS if p in self.direction.parts))


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
    said = {"weight": rollouts.weight_N, "behaviour": rollouts.behaviour_logprob_NS}
    return digest_of(rollouts.fingerprint, list(rollouts.tokens_NS.shape), digest_of_tensors(said))


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
