"""Predicted against measured over the step size, with noise floor and linear range."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entropy_experiments.report.figures.style import (
    ACCENT,
    FLOOR,
    INK,
    MUTED,
    WASH,
    in_units,
    legend_above,
    panels,
    whiskers,
    zero_line,
)
from entropy_experiments.report.sections import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = 41


def curve_figure(section: Curve, unit: str, *, columns: int) -> Figure:
    """`section`: the `curve` of a gathered run (`report.html.data`)."""
    figure, (axes,) = panels(1, columns=columns, height=2.5)
    lr, predicted, bend, points = (
        section["lr"],
        section["predicted"],
        section["curvature"],
        section["points"],
    )
    assert predicted is not None  # a curve is made of a prediction
    reach = max([lr, *(point["eta"] for point in points)]) * 1.06
    grid = [reach * i / (GRID - 1) for i in range(GRID)]
    slope = predicted["value"] / lr
    seen = [slope * reach]
    straight, floor = section["linear_range"], section["noise_floor"]
    if straight is not None:
        end = min(straight, reach)
        axes.axvspan(0, end, color=WASH, linewidth=0, zorder=0)
        inside, falls = end > reach / 3, slope < 0
        axes.annotate(  # where the curve is not: it starts at 0
            "line holds within 10 %" if inside else "◂ line holds within 10 %",
            (end, 0 if falls else 1),
            (-3 if inside else 3, 3 if falls else -3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="bottom" if falls else "top",
            color=MUTED,
            fontsize=6.5,
        )
    if floor:
        axes.axhspan(-floor, floor, color=FLOOR, linewidth=0, zorder=0.2, label="noise floor")
    zero_line(axes)
    if predicted["interval"] is not None:
        low, high = (end / lr for end in predicted["interval"])
        band = ([low * x for x in grid], [high * x for x in grid])
        axes.fill_between(grid, *band, color=ACCENT, alpha=0.15, linewidth=0)
        seen += [low * reach, high * reach]
    axes.plot(grid, [slope * x for x in grid], color=ACCENT, label="predicted, 95 %")
    if bend is not None:
        curved = [slope * x + bend["value"] * (x / lr) ** 2 for x in grid]
        axes.plot(grid, curved, ":", color=ACCENT, label="with curvature")
        seen.append(curved[-1])
    for trusted, name in ((True, "measured, 95 %"), (False, "measured, not trusted")):
        some = [point for point in points if bool(point["trusted"]) == trusted]
        if not some:
            continue
        values, bars = [p["value"] for p in some], [p["interval"] for p in some]
        colour = INK if trusted else MUTED
        axes.errorbar(
            [p["eta"] for p in some],
            values,
            yerr=whiskers(values, bars),
            fmt="o",
            color=colour,
            markerfacecolor=colour if trusted else "white",
            elinewidth=0.9,
            label=name,
        )
        seen += [*values, *(end for bar in bars if bar for end in bar)]
    axes.set_xlim(0, reach)
    in_units(axes.xaxis, [reach], "step size η", "")
    in_units(axes.yaxis, seen, "entropy change", f"nats per {unit}")
    entries = len(axes.get_legend_handles_labels()[0])
    legend_above(axes, entries if columns == 2 else 2)
    return figure
