"""What a run tells while it goes, and what it leaves beside its checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from entropy_experiments.checkpoints.training_facts import FACTS_FILE
from entropy_experiments.online.record import write_facts
from entropy_experiments.online.train.doctor import looking_away
from entropy_experiments.online.trl import EntropyProbeCallback


class UnwatchedProbe(EntropyProbeCallback):
    """The probe while the doctor looks away: its passes are no part of training.

    Without this they would be traced in the first steps, slowly, and reported as blind spots.
    """

    watcher: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        with looking_away(self.watcher):
            super().on_pre_optimizer_step(args, state, control, **more)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        with looking_away(self.watcher):
            super().on_optimizer_step(args, state, control, **more)


class TaskFacts(TrainerCallback):
    """`entropy_probe.json` for the run and each checkpoint, whether or not there is a probe.

    Also makes the checkpoint before the first step.
    """

    def __init__(self, facts: Mapping[str, Any], *, save_first: bool) -> None:
        self.facts, self.save_first = dict(facts), save_first
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        out = Path(args.output_dir)
        self._write(out, state)
        last = out / f"checkpoint-{state.global_step}"
        if state.global_step and last.is_dir() and not (last / FACTS_FILE).is_file():
            self._write(last, state)  # killed between the trainer's last file and ours
        if self.save_first and state.global_step == 0:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            self.trainer.callback_handler.on_save(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._write(Path(args.output_dir) / f"checkpoint-{state.global_step}", state)

    def _write(self, folder: Path, state: Any) -> None:
        if state.is_world_process_zero:
            write_facts(folder, self.trainer, self.facts)


SHOWN = {
    "reward": "reward",
    "entropy": "entropy",
    "entropy_probe/predicted": "predicted",
    "entropy_probe/measured": "measured",
    "grad_norm": "grad norm",
    "completions/mean_length": "length",
}


class ProgressLines(TrainerCallback):
    """A line on stderr for each row of metrics."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last = (state.global_step, time.monotonic())

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero or logs is None or "reward" not in logs:
            return
        told = [f"step {state.global_step}/{state.max_steps}"]
        told += [f"{word} {float(logs[name]):.4g}" for name, word in SHOWN.items() if name in logs]
        if self._last is not None and state.global_step > self._last[0]:
            seconds = (time.monotonic() - self._last[1]) / (state.global_step - self._last[0])
            told.append(f"{seconds:.1f} s/step")
        self._last = (state.global_step, time.monotonic())
        print("  ".join(told), file=sys.stderr, flush=True)
