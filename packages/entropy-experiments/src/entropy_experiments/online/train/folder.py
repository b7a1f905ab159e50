"""The folder of a run: begun once, continued from its last whole checkpoint.

The Trainer writes trainer_state.json last, so a checkpoint without it was cut off by a kill. The
summary is the last file of a run, so a run without it has not ended, whatever steps it has made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropy_experiments.artifacts import sweep_partials, write_whole
from entropy_experiments.checkpoints.runs import checkpoints_by_step
from entropy_experiments.config.keys import shown
from entropy_experiments.config.training import TrainingConfig
from entropy_experiments.config.training_reading import load_training, training_yaml
from entropy_experiments.results import TRAINER_STATE, read_training_summary

CONFIG_FILE = "entropy_probe_train.yaml"
DOCTOR_FILE = "doctor.json"
MAY_DIFFER = {
    "output_dir",
    "max_steps",
    "report_to",
    "run_name",
    "logging_steps",
    "save_total_limit",
    "probe",
    "doctor",
}
"""Keys that a resumed run may have otherwise: they do not change what a step does."""


def whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / TRAINER_STATE).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return True


def begun(out: Path) -> bool:
    return (out / CONFIG_FILE).exists() or bool(checkpoints_by_step(out))


def refuse_begun(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; expected a folder for the run. Choose another --out.")
    if begun(out):
        raise ValueError(
            f"{out} has a training already. Continue it with --resume, or choose another --out."
        )


def refuse_not_begun(out: Path) -> None:
    if not begun(out):
        raise ValueError(f"{out} has no training to resume. Check --out, or leave out --resume.")


def last_whole_checkpoint(out: Path) -> tuple[Path | None, list[Path]]:
    """(the last one that was written to its end, those after it that were not).

    One before the first step is none: a run begins from the beginning as quickly.
    """
    torn: list[Path] = []
    for checkpoint in reversed(checkpoints_by_step(out)):
        if whole(checkpoint):
            return (checkpoint if steps_made(checkpoint) else None), torn
        torn.append(checkpoint)
    return None, torn


def steps_made(checkpoint: Path) -> int:
    """Optimizer steps that led to a whole checkpoint."""
    return int(json.loads((checkpoint / TRAINER_STATE).read_text("utf-8"))["global_step"])


def ended(out: Path, steps: int) -> bool:
    """Whether a run of so many steps has written its summary, hence all that comes before it."""
    try:
        return int(read_training_summary(out)["steps"]) >= steps
    except (OSError, ValueError, KeyError, TypeError):
        return False


def clear_remains(out: Path, written_again: Sequence[Path]) -> None:
    """Delete what a killed process was writing: checkpoints without an end, files without a name.

    Otherwise a checkpoint that is written again would keep files of the one before.
    """
    for checkpoint in written_again:
        shutil.rmtree(checkpoint)
    sweep_partials(out)
    for remains in out.glob(f".{DOCTOR_FILE}.*"):
        remains.unlink(missing_ok=True)


def refuse_other_run(out: Path, config: TrainingConfig) -> None:
    """A resumed run is the same run: anything that changes its steps is refused by name."""
    file = out / CONFIG_FILE
    if not file.is_file():
        return
    before, now = load_training(file).dump(), config.dump()
    for name, value in now.items():
        if name not in MAY_DIFFER and before[name] != value:
            raise ValueError(
                f"{out} was begun with {name}: {shown(before[name])}; now it is {shown(value)}, "
                "which would be another run. Leave it as it was, or choose another --out."
            )


def resume_notes(checkpoint: Path, config: TrainingConfig, ranks: int) -> list[str]:
    """What makes the continuation differ from an undisturbed run."""
    notes = []
    kept = len(list(checkpoint.glob("rng_state*.pth")))
    if kept != ranks:
        notes.append(
            f"{checkpoint.name} has the random numbers of {kept} ranks, and there are {ranks} now: "
            "the run goes on, but not as it would have."
        )
    state: dict[str, Any] = json.loads((checkpoint / TRAINER_STATE).read_text("utf-8"))
    other = state.get("max_steps") != config.max_steps
    if other and config.lr_scheduler_type in ("linear", "cosine"):
        notes.append(
            f"max_steps is {config.max_steps}, and was {state.get('max_steps')}: the "
            f"{config.lr_scheduler_type} schedule has another rate from here on."
        )
    return notes


def write_config(out: Path, config: TrainingConfig) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / CONFIG_FILE, training_yaml(config).encode())
