"""The probe inside TRL's GRPOTrainer: one line, two curves.

    trainer = GRPOTrainer(..., callbacks=[EntropyProbeCallback()])

Where the trainer calls (see `tests/contract/test_trl_online.py`, which names every private of TRL's
that is relied upon):

    on_pre_optimizer_step   gradients clipped and averaged, weights old, the rate in use: predict
    on_optimizer_step       weights new: measure

Evaluation rollouts are drawn from the policy itself, with random numbers of the probe's own, on
prompts of the evaluation set, or of the training set where there is none. A callback is not told
which trainer it serves, so making the first one wraps `Trainer.train` to tell it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from entropy_experiments.numerics.ranks import ALONE, Ranks
from entropy_experiments.online.buffers import Buffer, Fixed, Fresh, Given
from entropy_experiments.online.drawing import drawer
from entropy_experiments.online.guard import LOG, Guard
from entropy_experiments.online.probe import OnlineProbe, StepPrediction, named_gradients
from entropy_experiments.online.record import Recorder
from entropy_experiments.online.rows import RowFile, metrics_of, row_of
from entropy_experiments.online.throttle import Throttle
from entropy_experiments.online.trl_batch import (
    EvaluationPrompts,
    other_rollouts,
    refuse_unsupported,
    unwrapped_optimizer,
)
from entropy_experiments.policy.scoring import SequenceProcessor
from entropy_experiments.rollouts.sample import SampleGenerator
from entropy_experiments.types import Rollouts

try:
    from transformers import Trainer, TrainerCallback
except ImportError as missing:
    raise ImportError(
        "entropy_experiments.online.trl is for TRL's GRPOTrainer, and transformers cannot be "
        f"imported ({missing}). Install the extra: pip install 'entropy-experiments[trl]'."
    ) from missing

_TELLS = "_entropy_probe_tells"
ROWS = "entropy_probe.jsonl"


class EntropyProbeCallback(TrainerCallback):
    """Predicts each probed step's entropy change before it is made, and measures it afterwards.

    `every`: a step is probed every so many steps; `max_overhead`: fewer, when the probe would take
    more than this share of the training time (None: no limit). `evaluation`: "fresh" rollouts,
    drawn anew for every `uses` probed steps; "half", those of the generation batch that the step
    does not learn from; or Rollouts of your own. `prompts` and `group`: how many are drawn.
    `record`: a folder that keeps every step's batch, for a replay by the offline commands.
    """

    def __init__(
        self,
        *,
        every: int = 1,
        max_overhead: float | None = 0.1,
        evaluation: Literal["fresh", "half"] | Rollouts = "fresh",
        prompts: int = 16,
        group: int = 1,
        uses: int = 1,
        microbatch: int = 8,
        parts: bool = True,
        record: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(evaluation, Rollouts) and evaluation not in ("fresh", "half"):
            raise ValueError(
                f"evaluation is {evaluation!r}; expected 'fresh', 'half' or Rollouts of your own."
            )
        if prompts < 5:
            raise ValueError(f"prompts is {prompts}; expected at least 5, for an error bar.")
        self._throttle_options: dict[str, Any] = {"every": every, "max_overhead": max_overhead}
        Throttle(**self._throttle_options)  # bad options are refused now, not hours later
        self.evaluation, self.prompts, self.group = evaluation, prompts, group
        self.uses, self.microbatch, self.parts, self.seed = uses, microbatch, parts, seed
        self._recorder = None if record is None else Recorder(Path(record))
        self.trainer: Any = None
        self.rows: list[dict[str, Any]] = []
        """What was found so far, one row per probed step (rank 0)."""
        self._probe: OnlineProbe | None = None
        self._guard = Guard(ALONE)
        self._file: RowFile | None = None
        _tell_trainers()

    def attach(self, trainer: Any) -> EntropyProbeCallback:
        """Add this callback to a trainer that exists; harmless if it is there already."""
        self.trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    @property
    def off(self) -> Exception | None:
        """Why the probe switched itself off, if it did."""
        return self._guard.error

    # what the trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer is None:
            raise RuntimeError(
                "EntropyProbeCallback does not know its trainer. Call .attach(trainer) before "
                "trainer.train()."
            )
        refuse_unsupported(self.trainer)
        self._ranks = Ranks.all()
        self._guard = Guard(self._ranks, on_failure=self._forget)
        self._throttle = Throttle(**self._throttle_options)
        self._guard.run(self._build, doing="it was set up")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with self._throttle.timing():
            self._guard.run(lambda: self._before(state.global_step), doing="predicting a step")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with self._throttle.timing():
            self._guard.run(lambda: self._after(state.global_step), doing="measuring a step")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._recorder is not None:
            recorder = self._recorder
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self._guard.run(
                lambda: recorder.saved(self.trainer, folder, self._ranks),
                doing="recording a checkpoint",
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._forget()

    # inside

    def _build(self) -> None:
        trainer = self.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        args = trainer.args
        policy = SequenceProcessor(model, temperature=args.temperature)
        self._policy = policy
        self._probe = OnlineProbe(
            policy,
            self._buffer(policy),
            horizon=args.max_completion_length,
            microbatch=self.microbatch,
            parts=self.parts,
            ranks=self._ranks,
        )
        self._pending: StepPrediction | None = None
        self._said_nonfinite = False
        if self._ranks.rank == 0:
            self._file = RowFile(Path(args.output_dir) / ROWS)

    def _buffer(self, policy: SequenceProcessor) -> Buffer:
        if isinstance(self.evaluation, Rollouts):
            return Fixed(self.evaluation)
        if self.evaluation == "half":
            return Given()
        trainer = self.trainer
        generator = SampleGenerator(
            policy,
            trainer._tokenizer,
            max_new_tokens=trainer.args.max_completion_length,
            master_seed=self.seed,
        )
        generator.ends = tuple(sorted({*generator.ends, *trainer.eos_token_ids}))
        prompts = EvaluationPrompts(trainer, self.prompts, self.seed)
        draw = drawer(generator, prompts, group=self.group, ranks=self._ranks)
        return Fresh(draw, uses=self.uses)

    def _before(self, step: int) -> None:
        assert self._probe is not None
        self._pending = None
        wanted = self._ranks.agree(word=int(self._throttle.wants(step)))
        if self._recorder is not None:
            self._recorder.record(self.trainer, step, self._ranks)
        if not wanted:
            return
        gradient = named_gradients(self._policy.model)
        if self._nonfinite(gradient):
            if not self._said_nonfinite:
                LOG.warning(
                    "Step %d has a gradient that is not finite: it is not probed. Training decides "
                    "what becomes of it. (Said once.)",
                    step,
                )
            self._said_nonfinite = True
            return
        buffer = self._probe.buffer
        if isinstance(buffer, Given):
            buffer.put(other_rollouts(self.trainer, self._ranks))
        self._throttle.note(step)
        self._probe.step = step
        optimizer = unwrapped_optimizer(self.trainer.optimizer)
        self._pending = self._probe.before_step(gradient, optimizer)
        if self._recorder is not None and self._probe.evaluated is not None:
            self._recorder.evaluated(self._probe.evaluated, step, self._ranks)

    def _after(self, step: int) -> None:
        assert self._probe is not None
        if self._pending is None:
            return
        self._pending = None
        found = self._probe.after_step()
        if self._ranks.rank:
            return
        row = row_of(
            found,
            step=step,
            probed_steps=self._throttle.probed,
            overhead=self._throttle.overhead,
        )
        self.rows.append(row)
        for name, value in metrics_of(row).items():
            self.trainer._metrics["train"][name].append(value)
        if self._file is not None:
            self._file.add(row)

    def _nonfinite(self, gradient: dict[str, Tensor | None]) -> bool:
        """Whether any rank sees a gradient that is not finite."""

        def local() -> list[Tensor]:
            bad = sum(
                int(not bool(torch.isfinite(g).all())) for g in gradient.values() if g is not None
            )
            return [torch.tensor(bad)]

        return bool(self._ranks.summed(local)[0])

    def _forget(self) -> None:
        """Let go of everything large."""
        self._probe, self._pending = None, None


def _tell_trainers() -> None:
    original = Trainer.train
    if hasattr(original, _TELLS):
        return

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EntropyProbeCallback):
                callback.trainer = self
        return original(self, *args, **kwargs)

    setattr(train, _TELLS, True)
    Trainer.train = train
