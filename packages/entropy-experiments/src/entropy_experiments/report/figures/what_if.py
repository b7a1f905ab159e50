"""The step as it was and every other step: predicted and, where made, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entropy_experiments.report.figures.style import (
    ACCENT,
    INK,
    UNSURE,
    in_units,
    legend_above,
    panels,
    whiskers,
)
from entropy_experiments.report.sections import WhatIfSection, answered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW = 0.26
LONGEST = 28


def what_if_figure(section: WhatIfSection, *, columns: int) -> Figure | None:
    """None: no question has an answer."""
    answers = answered(section)
    if not answers:
        return None
    names = ["as it was", *(_short(one.name) for one in answers)]
    totals = [answers[0].prediction["recorded"], *(one.prediction["total"] for one in answers)]
    figure, (axes,) = panels(1, columns=columns, height=0.85 + ROW * len(names))
    axes.axvline(totals[0], color=UNSURE, linewidth=0.8, linestyle=":", zorder=0.5)
    places = range(len(names))
    measured = [(0, section["measured"])] + [
        (place, one.measured) for place, one in enumerate(answers, start=1) if one.measured
    ]
    values = [one["value"] for _, one in measured]
    bars = [one["interval"] for _, one in measured]
    axes.errorbar(
        values,
        [place for place, _ in measured],
        xerr=whiskers(values, bars),
        fmt="o",
        color=INK,
        elinewidth=0.9,
        label="made and measured, 95 %",
    )
    axes.plot(
        totals,
        places,
        "D",
        color=ACCENT,
        markerfacecolor="none",
        markersize=5.5,
        label="predicted",
    )
    axes.set_yticks(list(places), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    seen = [*totals, *values, *(end for bar in bars if bar for end in bar)]
    in_units(axes.xaxis, seen, "entropy change", "nats")
    legend_above(axes, 2)
    return figure


def _short(name: str) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in name)
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"
