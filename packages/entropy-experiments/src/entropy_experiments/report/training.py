"""A probed training as a trajectory: its entropy_probe.jsonl and what the trainer logged. No torch.

Each row has the entropy before its step, and the step's change, predicted and measured. So the last
row's entropy is where the run has come to, and the changes of all rows before it should add up to
that. They can only where no step was left out; otherwise there are no sums.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from math import hypot
from pathlib import Path
from typing import Any

from entropy_experiments.report.training_history import ledgers, logged, trainer_state
from entropy_experiments.report.trajectory import CHANGES

NAME = "entropy_probe.jsonl"
LEFT_OUT = "steps were left out (every, max_overhead): the changes of the others do not add up"


def training_file(run: Path) -> Path | None:
    """The rows of an output folder, or the file itself; None: no such file."""
    path = run / NAME if run.is_dir() else run
    return path if path.is_file() and path.suffix == ".jsonl" else None


def probed_levels(path: Path) -> int:
    """How many rows have an entropy; two make a report."""
    return sum(row["entropy"] is not None for row in _rows(path))


def read_training(path: str | Path) -> dict[str, Any]:
    """The keys of a trajectory.json, and `not_summed`: why there are no sums, or None."""
    path = Path(path)
    rows = _rows(path)
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
        name: list(accumulate(row[name] for row in steps))
        if known[name] and not why
        else [None] * len(steps)
        for name in CHANGES
    }
    log = logged(trainer_state(path.parent))
    rewards = dict(log["reward"])
    first, end = (_estimate(row, "entropy") for row in (rows[0], last))
    doubts = dict.fromkeys(why for row in rows for why in row.get("why_not") or ())
    return {
        "unit": "token",
        "band": "evaluation rollouts, 95 %",
        "steps": [
            {
                "step": row["step"],
                "level": _estimate(row, "entropy"),
                **{name: _estimate(row, name) for name in CHANGES},
                **{f"{name}_sum": _alone(sums[name][at]) for name in CHANGES},
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
        **{name: last.get(name) for name in ("policy", "sampling")},
        "total": {
            **{name: _alone(sums[name][-1]) for name in CHANGES},
            "fresh": _difference(end, first),
        },
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except ValueError as error:
            if number == len(lines):
                continue  # being written at this moment
            raise ValueError(
                f"Line {number} of {path} is not JSON ({error}). Remove the line: it was cut short."
            ) from error
        if not isinstance(row, dict) or not {"step", "entropy", "predicted"} <= row.keys():
            raise ValueError(
                f"Line {number} of {path} is no row of a probed training; expected the {NAME} of "
                "`entropy-probe train` or EntropyProbeCallback."
            )
        rows.append(row)
    return last_branch(rows)


def last_branch(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a resume begins again at an earlier step, all rows from there on are of another run."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def _probed(row: Mapping[str, Any]) -> dict[str, Any]:
    """One row as the report tells it, trusted or not."""
    return {
        "step": row["step"],
        "entropy": _estimate(row, "entropy"),
        **{name: _estimate(row, name) for name in CHANGES},
        "trusted": bool(row["trusted"]),
        "why_not": list(row.get("why_not") or ()),
        **{name: row.get(name) for name in ("lr", "ess", "k_hat", "step_mismatch")},
    }


def _estimate(row: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    if row.get(name) is None:
        return None
    ends = [row.get(f"{name}_low"), row.get(f"{name}_high")]
    interval = None if None in ends else ends
    return {"value": row[name], "interval": interval, "stderr": None, "trusted": None}


def _alone(value: float | None) -> dict[str, Any] | None:
    """Without error bar: steps that share rollouts err together, and the rows do not say how."""
    return None if value is None else {"value": value, "interval": None, "stderr": None}


def _difference(end: Any, first: Any) -> dict[str, Any]:
    """Of two levels, as if their rollouts had nothing in common: an interval rather too wide."""
    value = end["value"] - first["value"]
    if end["interval"] is None or first["interval"] is None:
        return {"value": value, "interval": None, "stderr": None, "trusted": None}
    (low, high), (first_low, first_high) = end["interval"], first["interval"]
    below = hypot(end["value"] - low, first_high - first["value"])
    above = hypot(high - end["value"], first["value"] - first_low)
    return {"value": value, "interval": [value - below, value + above], "stderr": None}
