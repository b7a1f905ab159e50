"""What a probed step says, as numbers: one JSON row, and metrics for a dashboard.

A number that does not exist is null in the row, with the reason under `missing`; a dashboard does
not get it at all. No row holds a NaN.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from entropy_experiments.artifacts import named_os_errors, refuse_special_file
from entropy_experiments.online.probe import NEVER_MADE, StepMeasurement
from entropy_experiments.results import TRAINING_ROW, JSONObject, TrainingRow, read_rows
from entropy_experiments.types import Estimate

PREFIX = "entropy_probe/"
ALIASES = {
    "simple_entropy_delta_h_predicted": "predicted",
    "simple_entropy_grad_norm": "grad_norm",
    "simple_entropy_param_norm": "param_norm",
    "simple_entropy_step_count": "probed_steps",
}
"""Names of the earlier probe's curves."""
NOT_PLOTTED = ("why_not", "missing", "policy", "sampling")


def row_of(
    measurement: StepMeasurement,
    *,
    step: int,
    probed_steps: int,
    overhead: float,
    sampling: Sequence[str] = (),
) -> TrainingRow:
    """All that is known of one step; `step` is the trainer's own count before it.

    `sampling`: options by which training samples from another distribution than the policy's.
    """
    prediction, weights = measurement.prediction, measurement.change.diagnostics["weights"]
    row: JSONObject = {
        **TRAINING_ROW.stamp,
        "step": step,
        "policy": prediction.entropy.estimand.policy,
        "sampling": list(sampling),
    }
    for name, estimate in (
        ("entropy", prediction.entropy),
        ("predicted", prediction.change),
        ("measured", measurement.change),
        ("bend", measurement.bend),
    ):
        row |= _with_interval(name, estimate)
    for name, estimate in _of_second_order(measurement):
        row |= dict.fromkeys(_columns(name)) if estimate is None else _with_interval(name, estimate)
    row |= {
        "direct": prediction.direct.value,
        "state": prediction.state.value,
        "baseline": None if prediction.baseline is None else prediction.baseline.value,
        "baseline_share": prediction.baseline_share,
        "linear_range": measurement.linear_range,
        "ess": weights.ess,
        "k_hat": weights.k_hat,
        "kl": weights.kl,
        "lr": prediction.lr,
        "grad_norm": prediction.grad_norm,
        "param_norm": prediction.param_norm,
        "step_norm": measurement.step_norm,
        "step_mismatch": measurement.mismatch,
        "skipped": float(measurement.skipped),
        "trusted": float(not measurement.why_not),
        "rollouts": prediction.rollouts,
        "probed_steps": probed_steps,
        "overhead": overhead,
        "why_not": list(measurement.why_not),
    }
    return cast(TrainingRow, _without_nan(row, _reasons(measurement)))


def metrics_of(row: TrainingRow) -> dict[str, float]:
    """The numbers of a row under the names that trackers get."""
    numbers = {
        name: float(value)
        for name, value in cast(JSONObject, row).items()
        if name not in (*NOT_PLOTTED, *TRAINING_ROW.stamp) and value is not None
    }
    return {
        **{PREFIX + name: value for name, value in numbers.items()},
        **{alias: numbers[name] for alias, name in ALIASES.items() if name in numbers},
    }


class RowFile:
    """JSON lines, appended and flushed one by one; a torn last line is cut off when resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_special_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            whole = path.read_bytes()
            end = whole.rfind(b"\n") + 1
            if end < len(whole):
                os.truncate(path, end)

    def add(self, row: Mapping[str, object]) -> None:
        with named_os_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def probed_before(path: Path, step: int) -> int:
    """Steps of this run that were probed before `step`, which training is resumed at."""
    rows = read_rows(path) if step and path.is_file() else []
    return max((row["probed_steps"] for row in rows if row["step"] < step), default=0)


def _with_interval(name: str, estimate: Estimate) -> dict[str, float | None]:
    low, high = estimate.interval or (None, None)
    return dict(zip(_columns(name), (estimate.value, low, high), strict=True))


def _columns(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def _of_second_order(measurement: StepMeasurement) -> tuple[tuple[str, Estimate | None], ...]:
    return (
        ("second_order", measurement.prediction.second_order),
        ("second_miss", measurement.second_miss),
    )


def _reasons(measurement: StepMeasurement) -> dict[str, str]:
    prediction = measurement.prediction
    reasons = {
        "k_hat": "fewer than 100 rollouts, or weights so even that it says nothing",
        "linear_range": "the step was skipped, or measured exactly as predicted, or the interval "
        "of the predicted change contains 0",
        "step_mismatch": NEVER_MADE,
        "baseline": "parts=False",
        "baseline_share": "parts=False, or a predicted change of zero",
    }
    for name, estimate in (
        ("entropy", prediction.entropy),
        ("predicted", prediction.change),
        ("measured", measurement.change),
        ("bend", measurement.bend),
        *_of_second_order(measurement),
    ):
        if estimate is None:
            reasons |= dict.fromkeys(_columns(name), "order=1")
            continue
        why = "; ".join(estimate.own_reasons) or "no interval"
        reasons |= {f"{name}_low": why, f"{name}_high": why}
    return reasons


def _without_nan(row: JSONObject, reasons: Mapping[str, str]) -> JSONObject:
    missing = {}
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            row[name], missing[name] = None, f"not a finite number ({value})"
        elif value is None:
            missing[name] = reasons.get(name, "not known")
    return {**row, "missing": missing} if missing else row
