"""Ledgers as rows of a waterfall, the eta curve, weights: shapes that studies and logs share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from entropy_experiments.report.influence_tables import LINE_NAMES
from entropy_experiments.report.momentum import shown_ledgers
from entropy_experiments.report.sections import (
    Book,
    BookLine,
    BookRow,
    Curve,
    CurvePoint,
    LedgerSection,
    WeightsRow,
)
from entropy_experiments.report.words import contains_zero
from entropy_experiments.results import (
    AnyNumber,
    EvaluationBatch,
    LedgerLine,
    MeasuredResult,
    SweepPoint,
)

TOLERANCE = 0.1
"""The straight line holds where curvature is within this part of it (estimate.curvature)."""
Measured = AnyNumber | MeasuredResult | SweepPoint
"""A measured change; a study keeps its weights beside the numbers, a log in `diagnostics`."""


def book(
    name: str,
    unit: str,
    lines: Mapping[str, AnyNumber | LedgerLine],
    predicted: AnyNumber,
    curvature: AnyNumber | None,
    measured: AnyNumber | None,
    unexplained: AnyNumber | None,
) -> Book:
    """Rows from first to last; each begins where the one before ended, totals at 0."""
    rows: list[BookRow] = []
    at = 0.0
    for line, number in lines.items():
        value = number["this_step"] if "this_step" in number else number["value"]
        rows.append(_row(LINE_NAMES.get(line, line), "line", at, value, number))
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


def ledger(books: Sequence[Book]) -> LedgerSection:
    """Books side by side: `lines` has every line of any of them once, in their order."""
    lines: list[BookLine] = []
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


def study_books(evaluation: EvaluationBatch, unit: str) -> list[Book]:
    """The books of a study's ledger: entropy and, where there is one, reward."""
    out: list[Book] = []
    ledgers = shown_ledgers(evaluation)
    for name, units, one in (
        ("entropy", f"nats per {unit}", ledgers["entropy"]),
        ("reward", "expected reward", ledgers.get("reward")),
    ):
        if one is None:
            continue
        sums = (one["predicted"], one["curvature"], one["measured"], one["unexplained"])
        out.append({**book(name, units, one["lines"], *sums), "notes": one["notes"]})
    return out


def _row(
    name: str,
    kind: Literal["line", "total", "rest"],
    start: float,
    value: float,
    number: AnyNumber | LedgerLine,
) -> BookRow:
    return {
        "name": name,
        "kind": kind,
        "start": start,
        "value": value,
        "eventual": number.get("eventual"),
        "stderr": number.get("stderr"),
        "interval": number.get("interval"),
    }


def curve(
    lr: float,
    predicted: AnyNumber | None,
    curvature: AnyNumber | None,
    measured: Iterable[tuple[float, Measured]],
    *,
    linear_range: float | None = None,
) -> Curve:
    """Changes over the step size. Without `linear_range` it is found from the curvature.

    There is none for a slope whose own interval contains 0, nor from a curvature that has no
    interval or is not trusted.
    """
    points = [_point(eta, change) for eta, change in sorted(measured, key=_eta)]
    unsure = predicted is not None and contains_zero(predicted)
    if unsure:
        linear_range = None
    elif linear_range is None and predicted is not None and curvature is not None:
        interval = curvature.get("interval")
        if interval is not None and curvature.get("trusted") is not False:
            # At the interval's larger end: what is not known is no reason to trust a line.
            worst = max(map(abs, interval))
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


def _eta(measured: tuple[float, Measured]) -> float:
    return measured[0]


def _point(eta: float, change: Measured) -> CurvePoint:
    return {
        "eta": eta,
        "value": change["value"],
        "stderr": change.get("stderr"),
        "interval": change.get("interval"),
        "noise_floor": change.get("noise_floor"),
        "trusted": change.get("trusted"),
        "why_not": change.get("why_not"),
    }


def weights(measured: Iterable[tuple[float, Measured]]) -> list[WeightsRow]:
    """What the importance weights were at every step size."""
    rows: list[WeightsRow] = []
    for eta, change in sorted(measured, key=_eta):
        inside = change.get("diagnostics") or change
        rows.append(
            {
                "eta": eta,
                "ESS": inside.get("ESS"),
                "ESS_fraction": inside.get("ESS_fraction"),
                "k_hat": inside.get("k_hat"),
                "w_max": inside.get("w_max"),
                "w_min": inside.get("w_min"),
                "kl": inside.get("kl"),
                "clip_fraction": inside.get("clip_fraction"),
                "trusted": change.get("trusted"),
                "why_not": change.get("why_not") or [],
            }
        )
    return rows
