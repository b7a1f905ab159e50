"""Everything a report shows, as one plain dict, from files alone.

    gather(RUN)     RUN: a study's run directory, a log of `entropy-probe run`, what
                    `entropy-probe measure` wrote, a trajectory.json

A key per section. A section that the run has no data for is None, and `absent` says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entropy_experiments.report.html import words
from entropy_experiments.report.html.from_log import log_data
from entropy_experiments.report.html.from_measurements import measurements_data
from entropy_experiments.report.html.from_study import study_data
from entropy_experiments.report.html.token_views import MOST_TOKENS
from entropy_experiments.report.log_files import newest_log
from entropy_experiments.report.measurements import measurements_file
from entropy_experiments.report.training import read_training, training_file
from entropy_experiments.report.trajectory import (
    NAME,
    best_prediction,
    last_step,
    read_trajectory,
)
from entropy_experiments.study_files import IDENTITY, MANIFEST

EXPECTED = (
    "the folder of a study, of `run --out`, of `measure --out` or of a probed training, a log "
    f"(json or json.gz) or a {NAME}"
)
MOST_REASONS = 2
"""Not to trust steps of a training that are told one by one."""
NO_RUN = "one step was studied; give the run's trajectory.json (--trajectory)"


def gather(
    run: str | Path,
    *,
    trajectory: str | Path | None = None,
    evaluation: str | None = None,
    most_tokens: int = MOST_TOKENS,
) -> dict[str, Any]:
    """`evaluation`: of a study with several evaluation batches, the one to tell; default first."""
    kind, path = found_at(Path(run))
    with as_written(trajectory or path):
        steps = None if trajectory is None else read_trajectory(trajectory)
    with as_written(path):
        if kind in ("trajectory", "training"):
            steps = (read_trajectory if kind == "trajectory" else read_training)(path)
            out = _alone(path, steps, kind)
        elif kind == "measure":
            out = measurements_data(path)
        elif kind == "influence":
            out = study_data(path, evaluation=evaluation, most_tokens=most_tokens)
        else:
            out = log_data(path)
    out["trajectory"] = steps
    if steps is None:
        out["absent"]["entropy over the run"] = NO_RUN
    return out


def found_at(run: Path) -> tuple[str, Path]:
    """What a file or folder is, and the file (of a study the folder) that has its numbers."""
    if not run.exists():
        raise FileNotFoundError(f"No {run}; expected {EXPECTED}.")
    if not run.is_dir():
        if run.name.endswith(NAME):
            return "trajectory", run
        if training_file(run) is not None:
            return "training", run
        return ("probe" if measurements_file(run) is None else "measure"), run
    if any((run / name).exists() for name in (MANIFEST, IDENTITY)):
        return "influence", run
    if (run / NAME).is_file():
        return "trajectory", run / NAME
    if (rows := training_file(run)) is not None:
        return "training", rows
    measured, log = measurements_file(run), newest_log(run)
    if measured is not None and log is not None:
        raise ValueError(
            f"{run} has logs of `entropy-probe run` and the {measured.name} of `entropy-probe "
            f"measure`. Name the one you mean: {measured} or {log}."
        )
    if measured is not None:
        return "measure", measured
    if log is not None:
        return "probe", log
    begun = ", nothing that is finished" if any(run.iterdir()) else ", which is empty"
    raise FileNotFoundError(
        f"No run in {run}{begun}; expected {EXPECTED}. If it was interrupted, give the same "
        "command again: what was done is kept."
    )


@contextmanager
def as_written(path: str | Path) -> Iterator[None]:
    """Files that are not as this version writes them: an error that names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be told: {type(error).__name__} {error}. It was changed by hand, or is "
            "of another version (--debug shows where it failed)."
        ) from error


def _alone(path: Path, steps: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A trajectory without a study."""
    first, end = steps["steps"][0], last_step(steps)
    total = steps["total"]
    said = words.sentence(
        update=f"Training from step {first['step']} to step {end}",
        change=total["fresh"],
        level=first["level"]["value"],
        unit=steps["unit"],
        predicted=None,
    )
    sections = ("curve", "ledger", "weights", "rollouts", "texts", "covariance", "what_if")
    return {
        "kind": kind,
        "title": f"Entropy from step {first['step']} to {end}",
        "checkpoint": f"steps {first['step']} to {end}",
        "source": path.name,
        "key": None,
        "unit": steps["unit"],
        "level": first["level"],
        "predicted": best_prediction(total),
        "measured": total["measured"],
        "verdict": {
            "sentence": said,
            "points": _sums_of(steps),
            "trusted": False if total["measured"] is not None and _doubtful(steps) else None,
            "doubts": _doubts_of(steps),
            "text": [],
        },
        **dict.fromkeys(sections),
        "matrix": None,
        "assumed": None,
        "environment": None,
        "others": [],
        "absent": {"one step closely": "a trajectory has sums only (entropy-probe influence)"},
    }


def _doubts_of(steps: Mapping[str, Any]) -> list[str]:
    if "rows" not in steps:
        return words.doubts_of(*steps["total"].values())
    doubtful = _doubtful(steps)
    said = f"{doubtful} of {steps['rows']} probed steps are not trusted"
    reasons = [*steps["doubts"][:MOST_REASONS]]
    if len(steps["doubts"]) > MOST_REASONS:
        reasons.append(f"{len(steps['doubts']) - MOST_REASONS} more reasons in the rows")
    return [f"{said}: {'; '.join(reasons)}."] if doubtful else []


def _doubtful(steps: Mapping[str, Any]) -> int:
    """Probed steps of a training that are not trusted."""
    return steps["rows"] - steps["trusted"] if "rows" in steps else 0


def _sums_of(steps: Mapping[str, Any]) -> list[str]:
    total, told = steps["total"], []
    if total["predicted"] is None or total["measured"] is None:
        told.append(f"No sums of single steps: {steps['not_summed']}.")
    else:
        told.append(
            f"Summed over steps {steps['steps'][0]['step']} to {steps['steps'][-1]['step']}: "
            f"predicted {_both_orders(total)}, measured "
            f"{words.number(total['measured']['value'])}"
            + (": not trusted, as some of these steps are not." if _doubtful(steps) else ".")
        )
    if "rows" in steps and steps["trusted"] == steps["rows"]:
        told.append(f"All {steps['rows']} probed steps are trusted.")
    if steps.get("sampling"):
        told.append(
            f"Entropies of single steps are of the {steps['policy']}; training samples with "
            f"{', '.join(steps['sampling'])}."
        )
    return told


def _both_orders(total: Mapping[str, Any]) -> str:
    first, second = total["predicted"], total.get("second_order")
    if second is None:
        return words.number(first["value"])
    return (
        f"{words.number(second['value'])} to second order ({words.number(first['value'])} to first)"
    )
