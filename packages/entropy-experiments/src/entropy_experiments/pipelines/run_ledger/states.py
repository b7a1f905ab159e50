"""Model and optimizer before each step of a window: stored, or replayed between checkpoints.

A replay makes the steps between two stored checkpoints again (`replay`), keeps their states as
stages `state_t` until their steps are accounted for, and is certified at the second checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.recorded_run import RecordedRun
from entropy_experiments.config import Config
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.pipelines.influence.packing import pack_params, unpacked
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.pipelines.probe_inputs import (
    as_the_loss_sees,
    limits_of,
    other_start,
    refuse_foreign,
    with_reference,
)
from entropy_experiments.pipelines.probe_sampling import OpenCheckpoint
from entropy_experiments.pipelines.run_conditions import own_device
from entropy_experiments.pipelines.run_ledger.replay import (
    certify_arrival,
    learning_rates,
    replay_step,
)
from entropy_experiments.pipelines.run_ledger.stages import LedgerStages, Say
from entropy_experiments.pipelines.run_ledger.window import Window
from entropy_experiments.pipelines.training_facts import (
    TrainingFacts,
    training_facts,
    with_learning_rate,
)
from entropy_experiments.results.run_ledger import Arrival
from entropy_experiments.sampling.rollout_files import load_update_batch, recorded_meta
from entropy_experiments.types import OptimizerState, Params, UpdateBatch
from entropy_experiments.update.gradient import loss_gradient


@dataclass(frozen=True, kw_only=True, eq=False)
class RunState:
    """The model and the optimizer before one step, stored or replayed."""

    step: int
    probed: OpenCheckpoint
    replayed: bool

    @property
    def params(self) -> Params:
        return self.probed.policy.params

    @property
    def optimizer(self) -> OptimizerState:
        return self.probed.optimizer


@dataclass(kw_only=True, eq=False)
class RunStates:
    """The states of one window; of at most two steps at a time."""

    config: Config
    run: RecordedRun
    window: Window
    stages: LedgerStages
    say: Say | None
    _open: dict[int, RunState] = field(default_factory=dict)

    def at(self, step: int) -> RunState:
        """The model at a checkpoint; of at most two at a time, neighbours."""
        if step not in self._open:
            stored = step in self.window.anchors
            state = self._read(step) if stored else self._replayed(step)
            self._open = {s: x for s, x in self._open.items() if abs(s - step) <= 1}
            self._open[step] = state
        return self._open[step]

    def close(self, step: int) -> None:
        """Forget a model that is no longer needed."""
        self._open.pop(step, None)

    def _read(self, step: int) -> RunState:
        settings = self.config.checkpoint
        last = step == self.window.end
        checkpoint = load_checkpoint(
            self.run.checkpoints[step],
            base=settings.base,
            backbone=settings.backbone,
            dtype=settings.dtype,
            device_map=own_device(settings.device),
            need_optimizer=not last,
        )
        facts = training_facts(self.config, checkpoint.facts, checkpoint.fact_sources)
        policy = SequenceProcessor(
            checkpoint.model,
            temperature=facts["temperature"],
            top_p=facts["top_p"],
            checkpointing=self.config.memory.gradient_checkpointing,
        )
        if checkpoint.optimizer is None:  # after the last step nobody needs it
            before = max(anchor for anchor in self.window.anchors if anchor < step)
            groups = self._read(before).optimizer.groups
            optimizer = OptimizerState(groups=groups, state={})
        else:
            optimizer, made = checkpoint.optimizer, self.run.made(step)
            if made is not None and made.lr != optimizer.lr:  # a callback set it after saving
                optimizer = with_learning_rate(optimizer, made.lr)
        probed = OpenCheckpoint(
            checkpoint=checkpoint, policy=policy, facts=facts, optimizer=optimizer
        )
        return RunState(step=step, probed=probed, replayed=False)

    def _replayed(self, step: int) -> RunState:
        start, end = self.window.segment(step)
        if not self.stages.holds(f"replay_{end}"):
            self._replay(start, end)
        return self._restored(self._read(start), step)

    def _restored(self, stored: RunState, step: int) -> RunState:
        """The model of a stored checkpoint with the parameters of a replayed one."""
        stage = self.stages.get(f"state_{step}")
        names = ["params", *stage.facts["moments"]]
        groups = unpacked(stage.tensors, names)
        _put(stored.params, groups["params"])
        moments = {
            name: {
                **({} if count is None else {"step": count}),
                **{m: groups[m][name] for m in stage.facts["moments"] if name in groups[m]},
            }
            for name, count in stage.facts["counts"].items()
        }
        optimizer = with_learning_rate(
            OptimizerState(groups=stored.optimizer.groups, state=moments), stage.facts["lr"]
        )
        return RunState(
            step=step, probed=replace(stored.probed, optimizer=optimizer), replayed=True
        )

    def _replay(self, start: int, end: int) -> None:
        """States of the steps between two stored checkpoints, certified at the second."""
        last = self._read(end)
        expected = {name: theta.detach().clone() for name, theta in last.params.items()}
        state = self._read(start)
        before = {name: theta.detach().clone() for name, theta in state.params.items()}
        end_rate = last.optimizer.lr
        del last
        rates = [*learning_rates(self.run, start, end, state.optimizer.lr, end_rate), None]
        probed = replace(state.probed, optimizer=_rated(state.optimizer, rates[0]))
        state = replace(state, probed=probed)
        distances: list[float | None] = []
        for step in range(start, end):
            name = f"state_{step + 1}"
            if not self.stages.holds(name):
                batch, facts, trained = self.batch(state)
                gradient = loss_gradient(
                    trained, batch, facts.objective, microbatch=self._microbatch
                ).gradient
                after = replay_step(
                    self.run,
                    step,
                    state.params,
                    gradient,
                    state.optimizer,
                    max_grad_norm=facts["max_grad_norm"] or None,
                    next_rate=rates[step - start + 1],
                )
                self.stages.put(
                    name, _state_stage(after.params, after.optimizer, after.gradient_distance)
                )
                if self.say is not None:
                    self.say(f"step {step} replayed")
            state = self._restored(state, step + 1)
            distances.append(self.stages.get(name).facts["gradient_distance"])
        distance = certify_arrival(
            self.run,
            start,
            end,
            before,
            state.params,
            expected,
            distances,
            reasons=lambda: [
                *state.probed.facts.unfollowed,
                *limits_of(state.probed.checkpoint.model, state.probed.facts, real=True),
            ],
            assumed=state.probed.facts.assumed_of_step,
        )
        arrival: Arrival = {"start": start, "end": end, "distance": distance}
        self.stages.put(f"replay_{end}", Stage(facts={**arrival}))
        if self.say is not None:
            self.say(f"replay from {start} arrived at checkpoint {end} (off by {distance:.1e})")

    @property
    def _microbatch(self) -> int:
        return self.config.memory.microbatch_size

    def batch(self, state: RunState) -> tuple[UpdateBatch, TrainingFacts, SequenceProcessor]:
        """A step's recorded batch, the facts of its loss, and the policy as the loss sees it."""
        folder = self.run.batch(state.step)
        assert folder is not None  # find_window looked
        batch, meta = load_update_batch(folder)
        checkpoint = state.probed.checkpoint
        if meta.get("step", state.step) != state.step:
            raise ValueError(
                f"The update batch in {folder} is of step {meta['step']}; expected that of step "
                f"{state.step}. Put each batch beside the checkpoint it was drawn from."
            )
        bound = {} if state.replayed else meta  # replayed weights have no file
        refuse_foreign(batch, {**bound, "step": state.step}, checkpoint, folder)
        made = self.run.made(state.step)
        if made is not None and made.without_gradient:
            raise ValueError(
                f"In step {state.step} of {self.run.folder} {len(made.without_gradient)} "
                "parameters had no gradient; expected one for each: the optimizer left these "
                "alone, which the ledger of a run does not follow. Choose a window without it."
            )
        if not state.replayed and (reason := other_start(made, state.params)):
            raise ValueError(f"Step {state.step} of {self.run.folder}: {reason}.")
        facts = state.probed.facts
        divisor = recorded_meta(folder).get("divisor")
        if divisor is not None:
            facts = replace(facts, values={**facts.values, "divisor": divisor})
        batch = with_reference(self.config, state.probed, batch, real=True)
        policy = as_the_loss_sees(self.config, state.probed.policy, facts, real=True)
        return batch, facts, cast(SequenceProcessor, policy.as_trained())


def _state_stage(params: Params, optimizer: OptimizerState, apart: float | None) -> Stage:
    moments = sorted(
        {
            key
            for entry in optimizer.state.values()
            for key, value in entry.items()
            if key != "step" and isinstance(value, Tensor)
        }
    )
    groups: dict[str, Params] = {"params": params}
    for key in moments:
        groups[key] = {n: entry[key] for n, entry in optimizer.state.items() if key in entry}
    return Stage(
        facts={
            "moments": moments,
            "counts": {
                name: float(entry["step"]) if "step" in entry else None
                for name, entry in optimizer.state.items()
            },
            "lr": optimizer.lr,
            "gradient_distance": apart,
        },
        tensors=pack_params(groups),
    )


def _put(params: Params, values: Params) -> None:
    """Other parameters into a model that this process loaded for itself."""
    with torch.no_grad():
        for name, theta in params.items():
            theta.copy_(values[name])


def _rated(optimizer: OptimizerState, rate: float | None) -> OptimizerState:
    return optimizer if rate is None else with_learning_rate(optimizer, rate)
