"""A probed training as a trajectory: from its entropy_probe.jsonl alone. Without torch.

Each row has the entropy before its step, and the step's change, predicted and measured. So the last
row's entropy is where the run has come to, and the changes of all rows before it should add up to
that. They can only where no step was left out; otherwise there are no sums.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import hypot
from pathlib import Path
from typing import Any

NAME = "entropy_probe.jsonl"
LEFT_OUT = "steps were left out (every, max_overhead): the changes of the others do not add up"


def training_file(run: Path) -> Path | None:
    """The rows of an output folder, or the file itself; None: no such file."""
    path = run / NAME if run.is_dir() else run
    return path if path.is_file() and path.suffix == ".jsonl" else None


def read_training(path: str | Path) -> dict[str, Any]:
    """The keys of a trajectory.json, and `not_summed`: why there are no sums, or None."""
    path = Path(path)
    rows = _rows(path)
    known = [row for row in rows if row["entropy"] is not None]
    if len(known) < 2:
        raise ValueError(
            f"{path} has {len(known)} steps whose entropy is known; expected two or more. Train "
            "on, or probe more often (every)."
        )
    *steps, last = known
    gaps = any(b["step"] - a["step"] > 1 for a, b in pairwise(known))
    lacking = any(row[name] is None for row in steps for name in ("predicted", "measured"))
    why = LEFT_OUT if gaps else "a change is not known in every step" if lacking else None
    sums = {
        name: [None] * len(steps) if why else list(accumulate(row[name] for row in steps))
        for name in ("predicted", "measured")
    }
    rewards = _rewards(path.parent)
    first, end = (_estimate(row, "entropy") for row in (known[0], last))
    return {
        "unit": "token",
        "steps": [
            {
                "step": row["step"],
                "level": _estimate(row, "entropy"),
                "predicted": _estimate(row, "predicted"),
                "measured": _estimate(row, "measured"),
                "predicted_sum": _alone(sums["predicted"][at]),
                "measured_sum": _alone(sums["measured"][at]),
                "reward": rewards.get(row["step"] + 1),
            }
            for at, row in enumerate(steps)
        ],
        "last": end,
        "last_step": last["step"],
        "not_summed": why,
        "trusted": sum(bool(row["trusted"]) for row in rows),
        "rows": len(rows),
        "total": {
            "predicted": _alone(sums["predicted"][-1]),
            "measured": _alone(sums["measured"][-1]),
            "fresh": _difference(end, first),
        },
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    """In the order of steps; of a step that was made again after a resume, the last."""
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"Line {number} of {path} is not JSON ({error}). Remove the line: it was cut short."
            ) from error
        if not isinstance(row, dict) or "step" not in row or "entropy" not in row:
            raise ValueError(
                f"Line {number} of {path} is no row of a probed training; expected the {NAME} of "
                "`entropy-probe train` or EntropyProbeCallback."
            )
        rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def _estimate(row: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    if row[name] is None:
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


def _rewards(folder: Path) -> dict[int, float]:
    """By optimizer step, from the newest trainer_state.json in or below the output folder."""
    found: Sequence[Path] = sorted(
        folder.glob("**/trainer_state.json"), key=lambda p: p.stat().st_mtime_ns
    )
    for path in reversed(found):
        try:
            history = json.loads(path.read_bytes())["log_history"]
            return {row["step"]: row["reward"] for row in history if "reward" in row}
        except (ValueError, KeyError, TypeError):
            continue  # being written, or another program's: rewards are told where they are known
    return {}
