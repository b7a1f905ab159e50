"""What the drawings are made of: lines, bands, notes, and numbers as words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from entropy_experiments.report.words import number, signed

Figure = dict[str, Any]
"""A plotly figure: plain JSON, whose keys are plotly's own."""
Trace = Figure
"""A part of one: a line, a shape, a note."""


def figure_of(traces: list[Any], height: int, **layout: Any) -> Figure:
    return {"data": traces, "layout": {"height": height, **layout}}


def line(
    x: Sequence[float],
    y: Sequence[float],
    name: str,
    colour: str,
    *,
    dash: str = "solid",
    width: float = 2,
) -> Trace:
    return {
        "x": list(x),
        "y": list(y),
        "mode": "lines",
        "line": {"color": colour, "width": width, "dash": dash},
        "name": name,
        "hovertemplate": "%{x:.4g}: %{y:.4g}<extra>" + name + "</extra>",
    }


def edge(colour: str) -> Trace:
    return {"color": colour, "width": 1.5}


def band_of(axis: str, low: float, high: float, colour: str) -> Trace:
    other = "y" if axis == "x" else "x"
    return {
        "type": "rect",
        "layer": "below",
        f"{axis}0": low,
        f"{axis}1": high,
        f"{other}0": 0,
        f"{other}1": 1,
        f"{other}ref": "paper",
        "fillcolor": colour,
        "line": {"width": 0},
    }


def segment(x0: float, y0: float, x1: float, y1: float) -> Trace:
    return {"type": "line", "x0": x0, "y0": y0, "x1": x1, "y1": y1, "layer": "below"}


def across(y: float) -> Trace:
    line = {"color": "$axis", "width": 1}
    return {**segment(0, y, 1, y), "xref": "paper", "line": line}


def upright(x: float) -> Trace:
    line = {"color": "$axis", "width": 1}
    return {**segment(x, 0, x, 1), "yref": "paper", "line": line}


def note(x: float, y: float, text: str, anchor: str) -> Trace:
    return {
        "x": x,
        "y": y,
        "yref": "paper",
        "text": text,
        "showarrow": False,
        "xanchor": anchor,
        "yanchor": "top",
        "font": {"size": 11, "color": "$muted"},
    }


def interval_text(bar: Sequence[float] | None) -> str:
    return "no interval" if bar is None else f"95 % {number(bar[0])} to {number(bar[1])}"


def cell_text(value: float) -> str:
    return signed(f"{value:.1f}") if abs(value) >= 0.05 else "0.0"


def power_of(values: Sequence[Sequence[float]]) -> int:
    largest = max((abs(value) for row in values for value in row), default=0.0)
    return math.floor(math.log10(largest)) if largest else 0


def symmetric(values: Sequence[Sequence[float]], part: float) -> dict[str, float]:
    """Symmetric about zero."""
    sizes = sorted(abs(value) for row in values for value in row)
    size = sizes[min(len(sizes) - 1, int(part * len(sizes)))] if sizes else 0.0
    return {"zmin": -size, "zmax": size} if size else {}
