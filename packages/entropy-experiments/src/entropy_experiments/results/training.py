"""A run over its steps: trajectory.json, rows of a probed training, train_summary.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NotRequired, TypedDict, cast, final

from entropy_experiments.results.schema import TRAINING, TRAINING_ROW, TRAJECTORY, Number, Stamp

Change = Literal["predicted", "second_order", "measured"]
CHANGES: tuple[Change, ...] = ("predicted", "second_order", "measured")
TOTALS: tuple[Change | Literal["fresh"], ...] = (*CHANGES, "fresh")


class TrajectoryStepResult(TypedDict):
    """One step: the entropy before it, its changes, and their sums up to here."""

    step: int
    level: Number | None
    predicted: Number | None
    second_order: NotRequired[Number | None]
    measured: Number | None
    predicted_sum: Number | None
    second_order_sum: NotRequired[Number | None]
    measured_sum: Number | None
    reward: float | None


class TrajectoryTotal(TypedDict):
    """From the first checkpoint to the last."""

    predicted: Number | None
    second_order: NotRequired[Number | None]
    measured: Number | None
    fresh: Number


class TrajectoryResult(Stamp):
    """trajectory.json."""

    unit: str
    steps: list[TrajectoryStepResult]
    last: Number
    total: TrajectoryTotal


class TrainingRow(Stamp):
    """A row of entropy_probe.jsonl: one probed step, `null` where a number does not exist."""

    step: int
    policy: NotRequired[str]
    sampling: NotRequired[list[str]]
    entropy: float | None
    entropy_low: NotRequired[float | None]
    entropy_high: NotRequired[float | None]
    predicted: float | None
    predicted_low: NotRequired[float | None]
    predicted_high: NotRequired[float | None]
    second_order: NotRequired[float | None]
    second_order_low: NotRequired[float | None]
    second_order_high: NotRequired[float | None]
    second_miss: NotRequired[float | None]
    second_miss_low: NotRequired[float | None]
    second_miss_high: NotRequired[float | None]
    measured: float | None
    measured_low: NotRequired[float | None]
    measured_high: NotRequired[float | None]
    bend: NotRequired[float | None]
    bend_low: NotRequired[float | None]
    bend_high: NotRequired[float | None]
    direct: NotRequired[float | None]
    state: NotRequired[float | None]
    baseline: NotRequired[float | None]
    baseline_share: NotRequired[float | None]
    linear_range: NotRequired[float | None]
    ess: NotRequired[float | None]
    k_hat: NotRequired[float | None]
    kl: NotRequired[float | None]
    lr: NotRequired[float | None]
    grad_norm: NotRequired[float | None]
    param_norm: NotRequired[float | None]
    step_norm: NotRequired[float | None]
    step_mismatch: NotRequired[float | None]
    skipped: NotRequired[float]
    trusted: float
    rollouts: NotRequired[int]
    probed_steps: int
    overhead: float
    why_not: NotRequired[list[str]]
    missing: NotRequired[dict[str, str]]


ROWS_FILE = "entropy_probe.jsonl"
LEDGERS_FOLDER = "entropy_probe_ledgers"
"""Studies of single steps, in a training's output folder."""
TRAINER_STATE = "trainer_state.json"
"""What transformers' Trainer writes, last of a checkpoint."""
SUMMARY_FILE = "train_summary.json"


def read_trajectory(path: str | Path) -> TrajectoryResult:
    """A trajectory.json, checked; it has one step or more."""
    content = TRAJECTORY.read(
        Path(path),
        what="trajectory",
        expected="a trajectory.json as write_trajectory makes it",
        advice="Write it again.",
    )
    if not content.get("steps"):
        raise ValueError(f"{path} has no steps; expected one step or more. Write it again.")
    return cast(TrajectoryResult, content)


def read_rows(path: str | Path) -> list[TrainingRow]:
    """Rows of a probed training in the order of steps; what a resume left behind is left out.

    A last line without its end is being written at this moment, and not read.
    """
    path, rows = Path(path), []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except ValueError as error:
            if number == len(lines):
                continue
            raise ValueError(
                f"Line {number} of {path} is not JSON ({error}). Remove the line: it was cut short."
            ) from error
        if not isinstance(row, dict) or not {"step", "entropy", "predicted"} <= row.keys():
            raise ValueError(
                f"Line {number} of {path} is no row of a probed training; expected the {ROWS_FILE} "
                "of `entropy-probe train` or EntropyProbeCallback."
            )
        TRAINING_ROW.check(
            row, f"Line {number} of {path}", advice="Read it with the version that wrote it."
        )
        rows.append(row)
    return last_branch(rows)


def last_branch(rows: Iterable[TrainingRow]) -> list[TrainingRow]:
    """Where a resume begins again at an earlier step, all rows from there on are of another run."""
    kept: list[TrainingRow] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


class Ends(TypedDict):
    """Means of the first and of the last `rows` of all `of` rows."""

    first: float | None
    last: float | None
    rows: int
    of: int


class DoctorSummary(TypedDict):
    """Whether gradients were examined, how many warnings and errors there were, and which."""

    examined: bool
    findings: int
    worst: list[str]


class TrainingProbe(TypedDict):
    """What the probe of a training left."""

    rows: str
    record: str | None
    probed_steps: int
    predicted: float
    measured: float
    overhead: float | None
    ledgers: list[str]
    noise_scale: str | None
    off: str | None


@final
class TrainingResult(Stamp):
    """train_summary.json."""

    folder: str
    steps: int
    steps_now: int
    max_steps: int
    resumed_from: str | None
    seconds: float
    loss: float | None
    logging_steps: int
    reward: Ends
    entropy: Ends
    checkpoints: list[str]
    replayable: str | None
    config: str
    doctor: DoctorSummary
    probe: TrainingProbe | None


@final
class TrainingUnchanged(Stamp):
    """A resume that asks for no more steps than are made."""

    folder: str
    steps: int
    steps_now: int
    max_steps: int
    resumed_from: str | None
    nothing_to_do: bool


def read_training_summary(run: str | Path) -> TrainingResult:
    """The train_summary.json of a run's folder, or the file itself, checked."""
    path = Path(run) / SUMMARY_FILE if Path(run).is_dir() else Path(run)
    content = TRAINING.read(
        path,
        what="summary of a training",
        expected=f"the {SUMMARY_FILE} of `entropy-probe train`",
        advice="Resume the training: its summary is written last.",
    )
    return cast(TrainingResult, content)
