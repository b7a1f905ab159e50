"""What watches a training run: the probe, the gradient doctor, equal rewards, progress lines.

The doctor is a package of its own, and training works without it: then nothing is examined, and the
run says so.

Advantages compare the responses to one prompt. Where all of a group are rewarded alike they are 0,
and so is the gradient; if that is true of every group of the first steps, something is wrong with
the reward or the task, a hundred more steps would not mend it, and the run is ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from entropy_experiments.checkpoints.training_facts import FACTS_FILE, FactsFile
from entropy_experiments.config.training import TrainingConfig
from entropy_experiments.online.record import facts_of
from entropy_experiments.online.record_files import write_facts
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.results import DoctorSummary

if TYPE_CHECKING:
    from gradient_doctor.hf import DoctorCallback


INSTALL = "pip install gradient-doctor"
NOT_INSTALLED = f"gradient doctor: not installed, so gradients are not examined ({INSTALL})"
EQUAL_STEPS = 5
"""Of a run's beginning. A group of a hard task may be unlucky, all of five steps are not."""
EQUAL_METRIC = "frac_reward_zero_std"
"""TRL's: the share of groups without any spread (tests hold the name)."""
EQUAL_STATE = "equal_rewards"
"""Under `stateful_callbacks` of trainer_state.json: a run that is resumed counts on."""
SHOWN = {
    "reward": "reward",
    "entropy": "entropy",
    "entropy_probe/predicted": "predicted",
    "entropy_probe/measured": "measured",
    "grad_norm": "grad norm",
    "completions/mean_length": "length",
}


def doctor_installed() -> bool:
    """Whether there is a doctor to ask."""
    return find_spec("gradient_doctor") is not None


def doctor_callback(config: TrainingConfig, json: Path) -> DoctorCallback | None:
    """The doctor that the configuration asks for; None: none, or it is not installed."""
    wanted = config.doctor
    if not wanted.enabled:
        return None
    if not doctor_installed():
        if wanted.raise_on is not None:
            raise ValueError(
                f"doctor.raise_on is {wanted.raise_on!r}, and gradient-doctor is not installed; "
                f"expected the package, since nothing would be raised. {INSTALL}, or set "
                "doctor.raise_on: null."
            )
        return None
    from gradient_doctor.hf import DoctorCallback

    return DoctorCallback(
        contract={"trainable": ["*lora_*"]} if config.lora is not None else None,
        mode=wanted.mode,
        trace_steps=wanted.trace_steps,
        every=wanted.every,
        raise_on=wanted.raise_on,
        report=False,  # its notes are in the file; what is worse is told with the summary
        json=json,
    )


def gradient_errors() -> tuple[type[Exception], ...]:
    """What a doctor raises to end a training."""
    if not doctor_installed():
        return ()
    from gradient_doctor.hf import GradientError

    return (GradientError,)


def doctor_paused(watcher: DoctorCallback | None) -> AbstractContextManager[Any]:
    """What happens inside is not the doctor's business."""
    doctor = None if watcher is None else watcher.doctor
    return nullcontext() if doctor is None else doctor.session.pause()


def doctor_summary(doctor: DoctorCallback | None) -> DoctorSummary:
    """For the summary: whether gradients were examined, how many warnings and errors, and which."""
    if doctor is None:
        return {"examined": False, "findings": 0, "worst": []}
    from gradient_doctor.findings import Severity

    grave = [finding for finding in doctor.findings if finding.severity >= Severity.WARNING]
    worst = [finding.what for finding in grave[:3]]
    return {"examined": True, "findings": len(grave), "worst": worst}


class EqualRewardsError(Exception):
    """Every group of the first steps had equal rewards; the message is the diagnosis."""


class EqualRewards(TrainerCallback):
    """Ends a run that began with equal rewards; `refuse` then says so."""

    def __init__(self, functions: Sequence[str], *, group: int) -> None:
        self.functions, self.group = tuple(functions), group
        self.trainer: Any = None
        self._equal: list[bool] = []
        self._from_the_start = False
        self._reward: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        kept: Any = (
            state.stateful_callbacks.get(EQUAL_STATE) if state.global_step else {"equal": []}
        )
        equal = kept.get("equal") if isinstance(kept, dict) else None
        self._from_the_start = isinstance(equal, list)
        if isinstance(kept, dict) and isinstance(equal, list):
            self._equal = [bool(value) for value in equal]
            reward = kept.get("reward")
            self._reward = reward if isinstance(reward, float) else None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        looked = self._look()
        if looked and len(self._equal) >= EQUAL_STEPS and all(self._equal):
            control.should_training_stop = True
        if self._from_the_start:
            state.stateful_callbacks[EQUAL_STATE] = {"equal": self._equal, "reward": self._reward}

    def _look(self) -> bool:
        """Whether the last step is counted; later steps of a run that has learned are not."""
        metrics = self.trainer._metrics["train"]
        shares = metrics.get(EQUAL_METRIC) or []
        if not self._from_the_start or not shares or len(self._equal) >= EQUAL_STEPS:
            return False
        self._equal.append(float(shares[-1]) == 1.0)
        rewards = metrics.get("reward") or []
        self._reward = float(rewards[-1]) if rewards else None
        return True

    def refuse(self, *, cut_short: bool = False) -> None:
        """Raise if the run's beginning was such; `cut_short`: a doctor has ended it already."""
        if cut_short:
            self._look()
        enough = bool(self._equal) if cut_short else len(self._equal) >= EQUAL_STEPS
        if not enough or not all(self._equal):
            return
        reward = "" if self._reward is None else f" (last: {self._reward:.3g} on average)"
        raise EqualRewardsError(
            f"All {self.group} responses to each prompt of the first {len(self._equal)} steps had "
            f"equal rewards from {', '.join(self.functions)}{reward}: there is no advantage, so no "
            "gradient, and nothing is learned. Check the reward on a few responses, choose a task "
            "that the policy sometimes solves, or raise max_completion_length or num_generations."
        )


class UnwatchedProbe(EntropyProbeCallback):
    """The probe while the doctor looks away: its passes are no part of training.

    Without this they would be traced in the first steps, slowly, and reported as blind spots.
    """

    watcher: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        with doctor_paused(self.watcher):
            super().on_pre_optimizer_step(args, state, control, **more)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        with doctor_paused(self.watcher):
            super().on_optimizer_step(args, state, control, **more)


class TaskFacts(TrainerCallback):
    """`entropy_probe.json` for the run and each checkpoint, whether or not there is a probe.

    Also makes the checkpoint before the first step.
    """

    def __init__(self, facts: FactsFile, *, save_first: bool) -> None:
        self.facts, self.save_first = facts.copy(), save_first
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
            write_facts(folder, facts_of(self.trainer, self.facts))


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
