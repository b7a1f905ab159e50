"""Ledgers as rows of a waterfall, the eta curve, weights: shapes that studies and logs share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from entropy_experiments.report.amounts import contains_zero
from entropy_experiments.report.influence_tables import LINE_NAMES

TOLERANCE = 0.1
"""The straight line holds where curvature is within this part of it (estimate.curvature)."""
WEIGHTS = ("ESS", "ESS_fraction", "k_hat", "w_max", "w_min", "kl", "clip_fraction")
Numbers = Mapping[str, Any]


def book(
    name: str,
    unit: str,
    lines: Mapping[str, Numbers],
    predicted: Numbers,
    curvature: Numbers | None,
    measured: Numbers | None,
    unexplained: Numbers | None,
) -> dict[str, Any]:
    """Rows from first to last; each begins where the one before ended, totals at 0."""
    rows, at = [], 0.0
    for line, found in lines.items():
        value = found.get("this_step", found.get("value"))
        rows.append(_row(LINE_NAMES.get(line, line), "line", at, value, found))
        at += value
    rows.append(_row("predicted", "total", 0.0, predicted["value"], predicted))
    if curvature is not None:
        at = predicted["value"]
        rows.append(_row("curvature", "rest", at, curvature["value"], curvature))
    if measured is not None:
        if unexplained is not None:
            at = measured["value"] - unexplained["value"]
            rows.append(_row("unexplained", "rest", at, unexplained["value"], unexplained))
        rows.append(_row("measured", "total", 0.0, measured["value"], measured))
    largest = max(abs(row["value"]) for row in rows)
    power = 3 * math.floor(math.log10(largest) / 3) if largest else 0
    return {"name": name, "unit": unit, "power": power, "rows": rows}


def ledger(books: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Books side by side: `lines` has every line of any of them once, in their order."""
    lines: list[dict[str, Any]] = []
    for one in books:
        at = 0
        for row in one["rows"]:
            names = [line["name"] for line in lines]
            if row["name"] in names:
                at = names.index(row["name"]) + 1
            else:
                lines.insert(at, {"name": row["name"], "kind": row["kind"]})
                at += 1
    return {"books": list(books), "lines": lines}


def study_books(ledgers: Mapping[str, Any], unit: str) -> list[dict[str, Any]]:
    """The books of a study's ledger: entropy and, where there is one, reward."""
    out = []
    for name, units in (("entropy", f"nats per {unit}"), ("reward", "expected reward")):
        one = ledgers.get(name)
        if one is not None:
            parts = ("lines", "predicted", "curvature", "measured", "unexplained")
            out.append({**book(name, units, *(one[p] for p in parts)), "notes": one["notes"]})
    return out


def _row(name: str, kind: str, start: float, value: float, found: Numbers) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "start": start,
        "value": value,
        "eventual": found.get("eventual"),
        "stderr": found.get("stderr"),
        "interval": found.get("interval"),
    }


def curve(
    lr: float,
    predicted: Numbers | None,
    curvature: Numbers | None,
    measured: Iterable[tuple[float, Numbers]],
    *,
    linear_range: float | None = None,
) -> dict[str, Any]:
    """Changes over the step size. Without `linear_range` it is found from the curvature.

    There is none for a slope whose own interval contains 0.
    """
    points = [{"eta": eta, **_measured(found)} for eta, found in sorted(measured)]
    unsure = predicted is not None and contains_zero(predicted)
    if unsure:
        linear_range = None
    elif linear_range is None and predicted is not None and curvature is not None:
        # At the interval's larger end: a curvature that is not known is no reason to trust a line.
        worst = max(abs(x) for x in curvature.get("interval") or (curvature["value"],))
        linear_range = TOLERANCE * lr * abs(predicted["value"]) / worst if worst else None
    floors = [point["noise_floor"] for point in points if point["noise_floor"] is not None]
    return {
        "lr": lr,
        "predicted": predicted,
        "curvature": curvature,
        "points": points,
        "linear_range": linear_range,
        "unsure": unsure,
        "noise_floor": max(floors, default=None),
    }


def _measured(found: Numbers) -> dict[str, Any]:
    names = ("value", "stderr", "interval", "noise_floor", "trusted", "why_not")
    return {name: found.get(name) for name in names}


def weights(measured: Iterable[tuple[float, Numbers]]) -> list[dict[str, Any]]:
    """What the importance weights were at every step size."""
    rows = []
    for eta, found in sorted(measured):
        inside = found.get("diagnostics") or found
        row = {"eta": eta, **{name: inside.get(name) for name in WEIGHTS}}
        rows.append({**row, "trusted": found.get("trusted"), "why_not": found.get("why_not") or []})
    return rows
