"""Checkpoints over steps: passes, form, length, entropy; a panel each, with 95 % whiskers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from entropy_experiments.report.figures.style import (
    ACCENT,
    CREATE,
    DESTROY,
    INK,
    LINE,
    MUTED,
    image,
    legend_above,
    panels,
    paper_style,
    whiskers,
)
from entropy_experiments.results import EvaluatedCheckpoint, EvaluationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (ACCENT, DESTROY, CREATE, MUTED, INK)
NAMED = 12
"""Checkpoints whose names fit under an axis."""


def evaluation_image(result: EvaluationResult) -> bytes:
    """The PNG of a result."""
    with paper_style():
        return image(evaluation_figure(result), ".png")


def evaluation_figure(result: EvaluationResult) -> Figure:
    """Over steps where every checkpoint has one of its own, otherwise in the order given."""
    evaluated = result["checkpoints"]
    steps = [one["step"] for one in evaluated if one["step"] is not None]
    over_steps = len(set(steps)) == len(evaluated)
    at = list(range(len(evaluated)))
    if over_steps:
        at, evaluated = (
            sorted(steps),
            [one for _, one in sorted(zip(steps, evaluated), key=lambda p: p[0])],
        )
    figure, (passes, form, length, entropy) = panels(4, columns=2, height=2.1, across=2)
    some = [k for k in result["k"] if k > 1]
    lines = {"pass rate": "pass_rate"} | {f"pass@{k}": f"pass@{k}" for k in some}
    _lines(passes, at, evaluated, lines, "share of responses")
    shares = {"format": "format_rate", "answered": "answered", "truncated": "truncated"}
    _lines(form, at, evaluated, shares, "share of responses")
    low, high = ([one["length_quantiles"][q] for one in evaluated] for q in ("0.05", "0.95"))
    length.fill_between(at, low, high, color=LINE, linewidth=0, label="5 to 95 %")
    _lines(length, at, evaluated, {"mean": "length"}, "tokens per response")
    both = {"entropy": "entropy", "surprisal": "surprisal"}
    _lines(entropy, at, evaluated, both, "nats per token")
    for axes in (passes, form, length, entropy):
        axes.set_ylim(bottom=0)
        axes.set_xlabel("optimizer step" if over_steps else "")
        if not over_steps and len(evaluated) <= NAMED:
            names = [one["label"] for one in evaluated]
            axes.set_xticks(at, names, rotation=30, ha="right")
    return figure


def _lines(
    axes: Axes,
    at: Sequence[int],
    evaluated: Sequence[EvaluatedCheckpoint],
    names: Mapping[str, str],
    label: str,
) -> None:
    for (title, name), colour in zip(names.items(), COLOURS * len(names)):
        some = [one["measures"][name] for one in evaluated]
        values = [one["value"] for one in some]
        axes.errorbar(
            at,
            values,
            yerr=whiskers(values, [one["interval"] for one in some]),
            fmt="o-",
            markersize=3,
            color=colour,
            elinewidth=0.8,
            label=title,
        )
    axes.set_ylabel(label)
    legend_above(axes, len(axes.get_legend_handles_labels()[0]))
