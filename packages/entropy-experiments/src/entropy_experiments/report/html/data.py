"""Everything a report shows, from files alone.

    gather(RUN)     RUN: a study's run directory, a log of `entropy-probe run`, what
                    `entropy-probe measure` wrote, a trajectory.json

A key per section. A section that the run has no data for is None, and `absent` says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from entropy_experiments.report import words
from entropy_experiments.report.html.from_log import log_data
from entropy_experiments.report.html.from_measurements import measurements_data
from entropy_experiments.report.html.from_study import study_data
from entropy_experiments.report.html.token_views import MOST_TOKENS
from entropy_experiments.report.sections import ReportData, RunKind, Steps
from entropy_experiments.report.training import read_training, training_file
from entropy_experiments.report.trajectory import best_prediction, last_step
from entropy_experiments.results import (
    Number,
    measurements_file,
    newest_log,
    read_trajectory,
)
from entropy_experiments.results.run_ledger import is_run_ledger
from entropy_experiments.study_files import IDENTITY, MANIFEST

NAME = "trajectory.json"
EXPECTED = (
    "the folder of a study, of `run --out`, of `measure --out` or of a probed training, a log "
    f"(json or json.gz) or a {NAME}"
)
MOST_REASONS = 2
"""Untrusted steps of a training that are listed one by one."""
MOST_NAMED = 5
"""Steps without a row that are named."""
NO_RUN = "one step was studied; give the run's trajectory.json (--trajectory)"


def gather(
    run: str | Path,
    *,
    trajectory: str | Path | None = None,
    evaluation: str | None = None,
    most_tokens: int = MOST_TOKENS,
) -> ReportData:
    """`evaluation`: of a study with several evaluation batches, the one to tell; default first."""
    kind, path = found_at(Path(run))
    with as_written(trajectory or path):
        steps: Steps | None = None if trajectory is None else read_trajectory(trajectory)
    with as_written(path):
        if kind in ("trajectory", "training"):
            alone = read_trajectory(path) if kind == "trajectory" else read_training(path)
            steps, out = alone, _alone(path, alone, kind)
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


def found_at(run: Path) -> tuple[RunKind, Path]:
    """What a file or folder is, and the file (of a study the folder) that has its numbers."""
    if not run.exists():
        raise FileNotFoundError(f"No {run}; expected {EXPECTED}.")
    if not run.is_dir():
        if run.name.endswith(NAME):
            return "trajectory", run
        if training_file(run) is not None:
            return "training", run
        return ("probe" if measurements_file(run) is None else "measure"), run
    if is_run_ledger(run):
        raise ValueError(
            f"{run} is the ledger of a whole run (entropy-probe explain): it has a page of its own "
            "and does not stand beside single steps. Report it alone: entropy-probe report "
            f"{run}"
        )
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
            f"{path} cannot be shown: {type(error).__name__} {error}. It was changed by hand, or "
            "is of another version (--debug shows where it failed)."
        ) from error


def _alone(path: Path, steps: Steps, kind: RunKind) -> ReportData:
    """A trajectory without a study."""
    first, end = steps["steps"][0], last_step(steps)
    total, level = steps["total"], first["level"]
    sentence = words.sentence(
        update=f"Training from step {first['step']} to step {end}",
        change=total["fresh"],
        level=None if level is None else level["value"],
        unit=steps["unit"],
        predicted=None,
    )
    return {
        "kind": kind,
        "title": f"Entropy from step {first['step']} to {end}",
        "checkpoint": f"steps {first['step']} to {end}",
        "source": path.name,
        "key": None,
        "unit": steps["unit"],
        "level": level,
        "predicted": best_prediction(total),
        "measured": total["measured"],
        "verdict": {
            "sentence": sentence,
            "points": _sums_of(steps),
            "trusted": False if total["measured"] is not None and _doubtful(steps) else None,
            "doubts": _doubts_of(steps),
            "text": [],
        },
        "curve": None,
        "ledger": None,
        "momentum": None,
        "weights": None,
        "rollouts": None,
        "texts": None,
        "covariance": None,
        "what_if": None,
        "matrix": None,
        "assumed": None,
        "environment": None,
        "others": [],
        "absent": {"one step closely": "a trajectory has sums only (entropy-probe influence)"},
    }


def _doubts_of(steps: Steps) -> list[str]:
    if "rows" not in steps:
        total = steps["total"]
        return words.doubts_of(
            total["predicted"], total.get("second_order"), total["measured"], total["fresh"]
        )
    doubtful = _doubtful(steps)
    text = f"{doubtful} of {steps['rows']} probed steps are not trusted"
    reasons = [*steps["doubts"][:MOST_REASONS]]
    if len(steps["doubts"]) > MOST_REASONS:
        reasons.append(f"{len(steps['doubts']) - MOST_REASONS} more reasons in the rows")
    return [f"{text}: {'; '.join(reasons)}."] if doubtful else []


def _doubtful(steps: Steps) -> int:
    """Probed steps of a training that are not trusted."""
    return steps["rows"] - steps["trusted"] if "rows" in steps else 0


def _sums_of(steps: Steps) -> list[str]:
    total, sentences = steps["total"], []
    predicted, measured = total["predicted"], total["measured"]
    if predicted is None or measured is None:
        sentences.append(f"No sums of single steps: {steps.get('not_summed')}.")
    else:
        sentences.append(
            f"Summed over steps {steps['steps'][0]['step']} to {steps['steps'][-1]['step']}: "
            f"predicted {_both_orders(predicted, total.get('second_order'))}, measured "
            f"{words.number(measured['value'])}"
            + (": not trusted, as some of these steps are not." if _doubtful(steps) else ".")
        )
    if "rows" in steps and steps["trusted"] == steps["rows"]:
        sentences.append(f"All {steps['rows']} probed steps are trusted.")
    sentences += _without_rows(steps)
    sampling = steps.get("sampling")
    if sampling:
        sentences.append(
            f"Entropies of single steps are of the {steps.get('policy')}; training samples with "
            f"{', '.join(sampling)}."
        )
    return sentences


def _without_rows(steps: Steps) -> list[str]:
    """Why steps of the training are not among its rows: a warm-up's first has learning rate 0."""
    probed = {row["step"] for row in steps.get("probed") or ()}
    missing = sorted(set(range(max(probed, default=0))) - probed)
    if not missing:
        return []
    named = ", ".join(map(str, missing[:MOST_NAMED])) + (", ..." * (len(missing) > MOST_NAMED))
    return [
        f"{len(missing)} of {max(probed) + 1} steps have no row ({named}). Not probed: steps at "
        "learning rate 0, with a gradient that is not finite, and those that every or max_overhead "
        "leaves out."
    ]


def _both_orders(first: Number, second: Number | None) -> str:
    if second is None:
        return words.number(first["value"])
    return (
        f"{words.number(second['value'])} to second order ({words.number(first['value'])} to first)"
    )
