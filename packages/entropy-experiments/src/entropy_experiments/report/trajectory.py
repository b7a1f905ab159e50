"""A run's entropy over its steps as a file: trajectory.json.

    steps[i]    step, level, predicted, second_order, measured, reward; and the changes summed up
                to here
    last        entropy after the last step
    total       predicted, second_order, measured and fresh, from the first checkpoint to the last

Sums have intervals of their own: steps share their prompts, so their errors do not just add up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from entropy_experiments.artifacts import write_whole

if TYPE_CHECKING:
    from entropy_experiments.report.curves import Step
    from entropy_experiments.types import Estimate

FORMAT = "entropy_experiments.checkpoints.runs"
SCHEMA = 1
NAME = "trajectory.json"
CHANGES = ("predicted", "second_order", "measured")
TOTALS = (*CHANGES, "fresh")


class Run(Protocol):
    """What is kept of a run (`entropy_trajectory.Trajectory`)."""

    @property
    def steps(self) -> Sequence[Step]: ...
    @property
    def last(self) -> Estimate: ...
    @property
    def predicted(self) -> Estimate: ...
    @property
    def second_order(self) -> Estimate: ...
    @property
    def measured(self) -> Estimate: ...
    @property
    def fresh(self) -> Estimate: ...


def write_trajectory(run: Run, path: str | Path) -> Path:
    """The file appears whole or not at all."""
    # Here, not above: whoever reads the file needs no torch.
    from entropy_experiments.findings import numbers
    from entropy_experiments.types.estimate import combine

    path, rows = Path(path), []
    for at, step in enumerate(run.steps, start=1):
        so_far = run.steps[:at]
        rows.append(
            {
                "step": step.step,
                "level": numbers(step.level),
                **{name: numbers(getattr(step, name)) for name in CHANGES},
                **{
                    f"{name}_sum": numbers(combine([(1.0, getattr(s, name)) for s in so_far]))
                    for name in CHANGES
                },
                "reward": step.reward,
            }
        )
    content = {
        "format": FORMAT,
        "schema": SCHEMA,
        "unit": run.last.estimand.unit,
        "steps": rows,
        "last": numbers(run.last),
        "total": {name: numbers(getattr(run, name)) for name in TOTALS},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1, allow_nan=False).encode())
    return path


def last_step(found: Mapping[str, Any]) -> int:
    """Where the run has come to: of a probed training, whose last row says it, or one step on."""
    return found.get("last_step", found["steps"][-1]["step"] + 1)


def best_prediction(total: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The summed prediction of the highest order there is; None: nothing is summed."""
    return total.get("second_order") or total["predicted"]


def read_trajectory(path: str | Path) -> dict[str, Any]:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No file {path}; expected a {NAME} as write_trajectory makes it.")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}). Write it again.") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no trajectory; expected format {FORMAT!r}. Give another file.")
    if found.get("schema") != SCHEMA or not found.get("steps"):
        raise ValueError(
            f"{path} has schema {found.get('schema')!r} and {len(found.get('steps') or ())} steps; "
            f"this version reads schema {SCHEMA}, one step or more. Write it again."
        )
    return found
