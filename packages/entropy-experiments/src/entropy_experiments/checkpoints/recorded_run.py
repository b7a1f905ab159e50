"""A recorded run as a whole: its checkpoints, and the batch of every step.

    RUN/checkpoint-N                 weights before step N; beside them perhaps update_batch
    RUN/global_step_N                the same of verl; the record beside it says before which step
    RECORD/step_N/update_batch       what step N learned from, for every step
    RECORD/step_N/made_step          fingerprints of its gradient and of the step

RECORD is the folder that the callback was given; the record beside a checkpoint says where it is.
A batch beside its checkpoint is taken first: it names the weights it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from entropy_experiments.checkpoints.layout import UPDATE_BATCH
from entropy_experiments.checkpoints.recorded_step import (
    MADE_STEP,
    RecordedStep,
    read_recorded_step,
)
from entropy_experiments.checkpoints.runs import checkpoints_by_count
from entropy_experiments.checkpoints.training_record import read_record


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Where everything of a run is, by step."""

    folder: Path
    checkpoints: Mapping[int, Path]
    record: Path | None
    """Folder with step_N of every step; None: nothing but what is beside the checkpoints."""

    def batch(self, step: int) -> Path | None:
        """The recorded batch of a step."""
        return self._recorded(step, UPDATE_BATCH)

    def made(self, step: int) -> RecordedStep | None:
        """What is recorded of the step itself."""
        folder = self._recorded(step, MADE_STEP)
        return None if folder is None else read_recorded_step(folder)

    def _recorded(self, step: int, name: str) -> Path | None:
        places = [self.checkpoints[step]] if step in self.checkpoints else []
        places += [] if self.record is None else [self.record / f"step_{step}"]
        return next((place / name for place in places if (place / name).is_dir()), None)


def find_run(folder: Path) -> RecordedRun:
    """The run in a folder.

    Args:
        folder: Of a trainer's checkpoints.

    Returns:
        Its checkpoints and where its batches are.

    Raises:
        FileNotFoundError: If there is no such folder, or no checkpoint in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"Run not found: {folder}; expected a folder with checkpoints.")
    checkpoints = checkpoints_by_count(folder)
    if not checkpoints:
        raise FileNotFoundError(
            f"No checkpoint in {folder}; expected folders checkpoint-N (step_N, global_step_N) "
            "with weights, as a trainer saves them."
        )
    record = read_record((checkpoints[max(checkpoints)], folder))
    place = None if record is None else record.step_folder(0)
    return RecordedRun(
        folder=folder,
        checkpoints=checkpoints,
        record=folder if place is None else place.parent,
    )
