"""Everything a report shows, as one plain dict, from files alone.

    gather(RUN)     RUN: a study's run directory, a log of `entropy-probe run`, what
                    `entropy-probe measure` wrote, a trajectory.json

A key per section. A section that the run has no data for is None, and `absent` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropy_experiments.report.html import words
from entropy_experiments.report.html.from_log import log_data
from entropy_experiments.report.html.from_measurements import measurements_data
from entropy_experiments.report.html.from_study import study_data
from entropy_experiments.report.html.token_views import MOST_TOKENS
from entropy_experiments.report.log_files import newest_log
from entropy_experiments.report.measurements import measurements_file
from entropy_experiments.report.run_files import IDENTITY, MANIFEST
from entropy_experiments.report.trajectory_file import NAME, read_trajectory

NO_RUN = "one step was studied; give the run's trajectory.json (--trajectory)"


def gather(
    run: str | Path,
    *,
    trajectory: str | Path | None = None,
    evaluation: str | None = None,
    most_tokens: int = MOST_TOKENS,
) -> dict[str, Any]:
    """`evaluation`: of a study with several evaluation batches, the one to tell; default first."""
    run = Path(run)
    if not run.exists():
        raise FileNotFoundError(
            f"No {run}; expected the folder of a study, of `run --out` or of `measure --out`, a "
            f"log (json or json.gz) or a {NAME}."
        )
    run = log_of(run)
    steps = None if trajectory is None else read_trajectory(trajectory)
    if is_trajectory(run):
        steps = read_trajectory(run / NAME if run.is_dir() else run)
        out = _alone(run, steps)
    elif (measured := measurements_file(run)) is not None:
        out = measurements_data(measured)
    elif run.is_dir():
        out = study_data(run, evaluation=evaluation, most_tokens=most_tokens)
    else:
        out = log_data(run)
    out["trajectory"] = steps
    if steps is None:
        out["absent"]["entropy over the run"] = NO_RUN
    return out


def log_of(run: Path) -> Path:
    """The newest log of a folder that `entropy-probe run --out` wrote; anything else as it is."""
    if not run.is_dir() or any((run / name).exists() for name in (MANIFEST, IDENTITY, NAME)):
        return run
    return newest_log(run) or run


def is_trajectory(run: Path) -> bool:
    if run.is_dir():
        return (run / NAME).is_file() and not (run / "manifest.json").exists()
    return run.name.endswith(NAME)


def _alone(run: Path, steps: Mapping[str, Any]) -> dict[str, Any]:
    """A trajectory without a study."""
    first, last = steps["steps"][0], steps["steps"][-1]
    total = steps["total"]
    said = words.sentence(
        update=f"Training from step {first['step']} to step {last['step'] + 1}",
        change=total["fresh"],
        level=first["level"]["value"],
        unit=steps["unit"],
        predicted=None,
    )
    sections = ("curve", "ledger", "weights", "rollouts", "texts", "covariance", "what_if")
    return {
        "kind": "trajectory",
        "title": f"Entropy from step {first['step']} to {last['step'] + 1}",
        "checkpoint": f"steps {first['step']} to {last['step'] + 1}",
        "source": run.name,
        "key": None,
        "unit": steps["unit"],
        "level": first["level"],
        "predicted": total["predicted"],
        "measured": total["measured"],
        "verdict": {
            "sentence": said,
            "points": [
                f"Summed over the steps: predicted {words.number(total['predicted']['value'])}, "
                f"measured {words.number(total['measured']['value'])}."
            ],
            "trusted": None,
            "doubts": [],
            "text": [],
        },
        **dict.fromkeys(sections),
        "matrix": None,
        "assumed": None,
        "environment": None,
        "others": [],
        "absent": {"one step closely": "a trajectory has sums only (entropy-probe influence)"},
    }
