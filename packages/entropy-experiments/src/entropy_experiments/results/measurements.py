"""Results of `entropy-probe measure`: results.json, a mean over the repeats per step size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NotRequired, TypedDict

from entropy_experiments.results.schema import (
    MEASUREMENTS,
    EstimateResult,
    JSONObject,
    Stamp,
    WeightsResult,
)


class ClippedChange(EstimateResult):
    """A measured change with its weights clipped otherwise."""

    diagnostics: WeightsResult


class MeasuredPoint(TypedDict):
    """One repeat at one step size; what was not computed is absent."""

    eta: float
    measured: NotRequired[EstimateResult]
    linear: NotRequired[EstimateResult]
    linquad: NotRequired[EstimateResult]
    diagnostics: NotRequired[WeightsResult]
    differences: NotRequired[dict[str, EstimateResult]]
    clips: NotRequired[dict[str, ClippedChange]]


class Repeat(TypedDict):
    """One repeat: fresh batches, and every step size on them."""

    seed: int
    update: str
    B_E: int
    B_U: int
    evaluation_rollouts: str
    update_rollouts: str
    H_orig: EstimateResult
    points: list[MeasuredPoint]
    notes: list[str]
    seconds: float


class RepeatMean(TypedDict):
    """A number over the repeats."""

    mean: float
    stderr: float | None
    interval: list[float] | None
    repeats: int
    trusted: int
    """How many of them are."""


class MeanPoint(TypedDict):
    """Every number at one step size, over the repeats."""

    eta: float
    measured: NotRequired[RepeatMean]
    linear: NotRequired[RepeatMean]
    linquad: NotRequired[RepeatMean]
    differences: dict[str, RepeatMean]
    clips: dict[str, RepeatMean]


class MeasurementsResult(Stamp):
    """results.json of `measure`."""

    unit: str
    checkpoint: str
    learning_rate: float
    plan: JSONObject
    repeats: list[Repeat]
    summary: list[MeanPoint]
    config: JSONObject
    provenance: JSONObject
    results_path: str


MEASUREMENTS_FILE = "results.json"
MEASURE_AGAIN = "Run `entropy-probe measure` again: finished repeats are kept."


def measurements_file(run: Path) -> Path | None:
    """The file of a folder that `measure --out` wrote, or the file itself; None: no such file."""
    path = run / MEASUREMENTS_FILE if run.is_dir() else run
    if not path.is_file() or path.suffix != ".json":
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        if run.is_dir():
            raise ValueError(f"{path} is not JSON ({error}). {MEASURE_AGAIN}") from error
        return None  # whoever reads it as something else says what is wrong with it
    named = isinstance(content, dict) and content.get("format") == MEASUREMENTS.name
    return path if named else None


def read_measurements(path: str | Path) -> MeasurementsResult:
    """The results of `entropy-probe measure`."""
    path = Path(path)
    content = json.loads(path.read_bytes())
    MEASUREMENTS.check(content, path, advice=MEASURE_AGAIN)
    return content
