"""A probed training as a trajectory: its entropy_probe.jsonl and what the trainer logged. No torch.

Each row has the entropy before its step, and the step's change, predicted and measured. So the last
row's entropy is where the run has come to, and the changes of all rows before it should add up to
that. They can only where no step was left out; otherwise there are no sums.

trainer_state.json counts a step when it is made: its row k speaks of the step that the probe's rows
call k - 1, and of the rollouts that step learned from. TRL's own `entropy` is that of the training
batch at the sampling temperature, before the step.

`follow` draws the report again while training goes on: rows only grow, and the trainer's own state
is a file too. Training has ended when its state has come to max_steps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from entropy_experiments.results import (
    CHANGES,
    LEDGERS_FOLDER,
    ROWS_FILE,
    TRAINER_STATE,
    Change,
    EstimateResult,
    JSONObject,
    Number,
    TrainingRow,
    TrajectoryStepResult,
    TrajectoryTotal,
    read_rows,
)

LOGGED = ("entropy", "reward")
LEFT_OUT = "steps were left out (every, max_overhead): the changes of the others do not add up"
EVERY = 5.0
"""Seconds between two looks at the files, and after which a browser loads the page again."""


class ProbedStep(TypedDict):
    """One row as the report shows it, trusted or not."""

    step: int
    entropy: Number | None
    predicted: Number | None
    second_order: Number | None
    measured: Number | None
    trusted: bool
    why_not: list[str]
    lr: float | None
    ess: float | None
    k_hat: float | None
    step_mismatch: float | None


class StepStudy(TypedDict):
    """The influence study of one step, in a folder of its own."""

    step: int
    folder: str
    page: str
    predicted: EstimateResult
    measured: EstimateResult
    path: NotRequired[str]
    href: NotRequired[str]
    """Where the page links to; set where the page's own place is known."""


class TrainingSteps(TypedDict):
    """The keys of a trajectory.json, and what only a training has."""

    unit: str
    band: str
    steps: list[TrajectoryStepResult]
    last: Number
    last_step: int
    probed: list[ProbedStep]
    logged: dict[str, list[tuple[int, float]]]
    ledgers: list[StepStudy]
    not_summed: str | None
    """Why there are no sums, if there are none."""
    trusted: int
    rows: int
    doubts: list[str]
    policy: NotRequired[str | None]
    sampling: NotRequired[list[str] | None]
    total: TrajectoryTotal


def training_file(run: Path) -> Path | None:
    """The rows of an output folder, or the file itself; None: no such file."""
    path = run / ROWS_FILE if run.is_dir() else run
    return path if path.is_file() and path.suffix == ".jsonl" else None


def probed_levels(path: Path) -> int:
    """How many rows have an entropy; two make a report."""
    return sum(row["entropy"] is not None for row in read_rows(path))


def read_training(path: str | Path) -> TrainingSteps:
    """Every probed step of a training, and their sums where these can be taken."""
    path = Path(path)
    rows = read_rows(path)
    probed = [_probed(row) for row in rows]
    levels = [at for at, row in enumerate(rows) if row["entropy"] is not None]
    if len(levels) < 2:
        raise ValueError(
            f"{path} has {len(levels)} steps whose entropy is known; expected two or more. Train "
            "on, or probe more often (every)."
        )
    rows = rows[levels[0] : levels[-1] + 1]
    *steps, last = rows
    gaps = any(b["step"] - a["step"] > 1 for a, b in pairwise(rows))
    lacking = any(row[name] is None for row in steps for name in ("predicted", "measured"))
    why = LEFT_OUT if gaps else "a change is not known in every step" if lacking else None
    # Rows with order=1, and those of earlier versions, have no second order: then there is no sum.
    known = {name: not any(row.get(name) is None for row in steps) for name in CHANGES}
    sums = {
        name: list(accumulate(row.get(name) or 0.0 for row in steps))
        if known[name] and not why
        else [None] * len(steps)
        for name in CHANGES
    }
    log = logged(trainer_state(path.parent))
    rewards = dict(log["reward"])
    first, end = (_estimate(row, "entropy") for row in (rows[0], last))
    assert first is not None  # these rows begin and end with an entropy
    assert end is not None
    doubts = dict.fromkeys(why for row in rows for why in row.get("why_not") or ())
    return {
        "unit": "token",
        "band": "evaluation rollouts, 95 %",
        "steps": [
            {
                "step": row["step"],
                "level": _estimate(row, "entropy"),
                "predicted": _estimate(row, "predicted"),
                "second_order": _estimate(row, "second_order"),
                "measured": _estimate(row, "measured"),
                "predicted_sum": _alone(sums["predicted"][at]),
                "second_order_sum": _alone(sums["second_order"][at]),
                "measured_sum": _alone(sums["measured"][at]),
                "reward": rewards.get(row["step"]),
            }
            for at, row in enumerate(steps)
        ],
        "last": end,
        "last_step": last["step"],
        "probed": probed,
        "logged": log,
        "ledgers": ledgers(path.parent),
        "not_summed": why,
        "trusted": sum(bool(row["trusted"]) for row in rows),
        "rows": len(rows),
        "doubts": list(doubts),
        "policy": last.get("policy"),
        "sampling": last.get("sampling"),
        "total": {
            "predicted": _alone(sums["predicted"][-1]),
            "second_order": _alone(sums["second_order"][-1]),
            "measured": _alone(sums["measured"][-1]),
            "fresh": _difference(end, first),
        },
    }


def _probed(row: TrainingRow) -> ProbedStep:
    return {
        "step": row["step"],
        "entropy": _estimate(row, "entropy"),
        "predicted": _estimate(row, "predicted"),
        "second_order": _estimate(row, "second_order"),
        "measured": _estimate(row, "measured"),
        "trusted": bool(row["trusted"]),
        "why_not": list(row.get("why_not") or ()),
        "lr": row.get("lr"),
        "ess": row.get("ess"),
        "k_hat": row.get("k_hat"),
        "step_mismatch": row.get("step_mismatch"),
    }


def _estimate(row: TrainingRow, name: Change | Literal["entropy"]) -> Number | None:
    value = row.get(name)
    if value is None:
        return None
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    interval = None if low is None or high is None else [low, high]
    return {"value": value, "interval": interval, "stderr": None, "trusted": None}


def _alone(value: float | None) -> Number | None:
    """Without error bar: steps that share rollouts err together, and the rows do not say how."""
    return None if value is None else {"value": value, "interval": None, "stderr": None}


def _difference(end: Number, first: Number) -> Number:
    """Of two levels, as if their rollouts had nothing in common: an interval rather too wide."""
    value = end["value"] - first["value"]
    if end["interval"] is None or first["interval"] is None:
        return {"value": value, "interval": None, "stderr": None, "trusted": None}
    (low, high), (first_low, first_high) = end["interval"], first["interval"]
    below = math.hypot(end["value"] - low, first_high - first["value"])
    above = math.hypot(high - end["value"], first["value"] - first_low)
    return {"value": value, "interval": [value - below, value + above], "stderr": None}


# What the trainer logged, and the studies of single steps.


def trainer_state(folder: Path) -> JSONObject:
    """The trainer_state.json that has come furthest; empty where there is none yet."""
    states = []
    for path in (folder / TRAINER_STATE, *folder.glob(f"checkpoint-*/{TRAINER_STATE}")):
        try:
            state = json.loads(path.read_bytes())
            states.append((int(state["global_step"]), path.name, state))
            state["log_history"][:0]  # a list, or not a trainer's file
        except (OSError, ValueError, KeyError, TypeError):
            continue  # absent or being written: steps are told where they are known
    return max(states, key=lambda state: state[:2], default=(0, "", {}))[2]


def logged(state: JSONObject) -> dict[str, list[tuple[int, float]]]:
    """(step as the probe counts, value) of everything in LOGGED that the trainer wrote."""
    out: dict[str, dict[int, float]] = {name: {} for name in LOGGED}
    for row in state.get("log_history", ()):
        for name in LOGGED:
            value = row.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                out[name][int(row["step"]) - 1] = float(value)
    return {name: sorted(values.items()) for name, values in out.items()}


def ended(state: JSONObject) -> bool:
    """Whether the trainer has made all the steps that it was to make."""
    most = state.get("max_steps")
    return bool(most) and state["global_step"] >= most


def ledgers(folder: Path) -> list[StepStudy]:
    """Run directories of single steps, with what they predicted and measured."""
    studies: list[StepStudy] = []
    for place in (folder / LEDGERS_FOLDER).glob("step_*"):
        try:
            summary = json.loads((place / "summary.json").read_bytes())
            entropy = summary["evaluations"][0]["ledger"]["entropy"]
            predicted, measured = entropy["predicted"], entropy["measured"]
            step = int(place.name.removeprefix("step_"))
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            continue  # not finished yet
        page = next(n for n in ("report.html", "summary.json") if (place / n).is_file())
        studies.append(
            {
                "step": step,
                "folder": place.relative_to(folder).as_posix(),
                "page": page,
                "predicted": predicted,
                "measured": measured,
            }
        )
    return sorted(studies, key=lambda study: study["step"])


def follow(
    run: Path,
    draw: Callable[[bool], object],
    *,
    every: float = EVERY,
    sleep: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Call `draw(whether training goes on)` at every change until training ends; how often it was.

    Fewer than two probed steps cannot be drawn: then it waits. Ctrl-C ends it, the page stays.
    """
    if not (run.is_dir() or training_file(run) is not None):
        raise FileNotFoundError(
            f"--follow: no {run}; expected the output folder of a probed training, or its "
            f"{ROWS_FILE}."
        )
    folder = run if run.is_dir() else run.parent
    seen, drawn, waiting = None, 0, False
    while True:
        # Before it is read: what is written in the meantime is a change of the next look.
        now = _signature(run, folder)
        over = ended(trainer_state(folder))
        rows = training_file(run)
        if rows is not None and probed_levels(rows) >= 2 and now != seen:
            draw(not over)
            seen, drawn = now, drawn + 1
        elif not drawn and not waiting:
            say(f"waiting for the second probed step in {folder}")
            waiting = True
        if over:
            return drawn
        sleep(every)


def _signature(run: Path, folder: Path) -> tuple[tuple[str, int, int], ...]:
    rows = run / ROWS_FILE if run.is_dir() else run
    files = [rows, folder / TRAINER_STATE, *sorted(folder.glob(f"checkpoint-*/{TRAINER_STATE}"))]
    files += sorted(folder.glob(f"{LEDGERS_FOLDER}/step_*/summary.json"))
    signature = []
    for path in files:
        try:
            facts = path.stat()
        except OSError:
            continue
        signature.append((str(path), facts.st_size, facts.st_mtime_ns))
    return tuple(signature)
