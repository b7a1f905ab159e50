"""What changed the entropy: rollouts in order, tokens and sums by probability and advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entropy_experiments.report.figures.style import (
    CREATE,
    DESTROY,
    DIVERGING,
    INK,
    UNSURE,
    in_units,
    legend_above,
    panels,
    zero_line,
)
from entropy_experiments.report.html.influence_charts import WHISKERS
from entropy_experiments.report.html.marks import cell_text, power_of, symmetric
from entropy_experiments.report.html.words import unit_of
from entropy_experiments.report.sections import (
    CovarianceCells,
    CovarianceSection,
    MatrixSection,
    RolloutsSection,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rollouts_figure(section: RolloutsSection, *, columns: int) -> Figure:
    """Every update rollout, from most destroying to most creating."""
    figure, (axes,) = panels(1, columns=columns, height=2.2)
    rows = section["rows"]
    size = 4.0 if len(rows) <= 60 else 2.5 if len(rows) <= 600 else 1.2
    kinds = (
        ("lowers", DESTROY, lambda row: row.get("stable") and row["value"] < 0),
        ("raises", CREATE, lambda row: row.get("stable") and row["value"] > 0),
        ("sign unsure", UNSURE, lambda row: not row.get("stable")),
    )
    zero_line(axes)
    entries = 0
    for name, colour, keep in kinds:
        some = [(place, row) for place, row in enumerate(rows, start=1) if keep(row)]
        if not some:
            continue
        errors = [row.get("stderr") or 0.0 for _, row in some] if len(rows) <= WHISKERS else None
        axes.errorbar(
            [place for place, _ in some],
            [row["value"] for _, row in some],
            yerr=errors,
            fmt="o",
            markersize=size,
            markeredgewidth=0,
            color=colour,
            elinewidth=0.7,
            label=name,
        )
        entries += 1
    axes.set_xlabel(f"{len(rows)} update rollouts, in order of influence")
    axes.set_xlim(0, len(rows) + 1)
    spread = [abs(row["value"]) + (row.get("stderr") or 0.0) for row in rows]
    in_units(axes.yaxis, spread, "influence", "nats")
    legend_above(axes, max(1, entries))
    return figure


def points_figure(section: CovarianceSection, *, columns: int) -> Figure:
    """Single tokens: influence against probability, by the advantage's sign."""
    figure, (axes,) = panels(1, columns=columns, height=2.4)
    at = section["points"]
    tokens = list(zip(at["probability"], at["influence"], at["advantage"], at["stable"]))
    kinds = (
        ("sign unsure", ".", UNSURE, UNSURE, lambda a, sure: not sure),
        ("advantage < 0", "v", "none", INK, lambda a, sure: sure and a < 0),
        ("advantage > 0", "^", INK, INK, lambda a, sure: sure and a >= 0),
    )
    zero_line(axes)
    for name, marker, face, edge, keep in kinds:
        some = [(p, v) for p, v, a, sure in tokens if keep(a, sure)]
        if some:
            axes.scatter(
                *zip(*some),
                s=9,
                marker=marker,
                facecolors=face,
                edgecolors=edge,
                linewidths=0.5,
                alpha=0.65,
                label=name,
                rasterized=len(tokens) > 2_000,
            )
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("probability of the token")
    in_units(axes.yaxis, at["influence"], "influence", "nats")
    legend_above(axes, 3)
    return figure


def cells_figure(section: CovarianceCells, *, columns: int) -> Figure:
    """Sums over cells of probability and advantage: the covariance picture."""
    from matplotlib.colors import LinearSegmentedColormap

    sums, counts = section["influence"], section["tokens"]
    figure, (axes,) = panels(1, columns=columns, height=0.9 + 0.27 * len(sums))
    power, ends = power_of(sums), symmetric(sums, 1.0)
    shown = [
        [float("nan") if not count else value for value, count in zip(*row)]
        for row in zip(sums, counts)
    ]
    colours = LinearSegmentedColormap.from_list("influence", DIVERGING)
    axes.pcolormesh(
        shown,
        cmap=colours,
        vmin=ends.get("zmin", -1),
        vmax=ends.get("zmax", 1),
        edgecolors="white",
        linewidth=1.5,
    )
    for y, (row, count_row) in enumerate(zip(sums, counts)):
        for x, (value, count) in enumerate(zip(row, count_row)):
            if count:
                text = cell_text(value / 10.0**power)
                axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=6)
    places = range(len(section["probability"]))
    axes.set_xticks([x + 0.5 for x in places], section["probability"], fontsize=6)
    axes.set_yticks([y + 0.5 for y in range(len(sums))], section["advantage"], fontsize=6)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel(f"probability (sums in {unit_of(power)}nats)")
    axes.set_ylabel("advantage")
    return figure


def matrix_figure(section: MatrixSection, *, columns: int) -> Figure:
    """Contributions of pairs; rows and columns in order of their sums."""
    from matplotlib.colors import LinearSegmentedColormap

    values = section["values"]
    figure, (axes,) = panels(1, columns=columns, height=2.5)
    # Single pairs are extreme: the colour is full where one in a hundred is larger.
    ends = symmetric(values, 0.99)
    drawn = axes.imshow(
        values,
        cmap=LinearSegmentedColormap.from_list("influence", DIVERGING),
        vmin=ends.get("zmin", -1),
        vmax=ends.get("zmax", 1),
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel(f"{section['shape'][1]} update rollouts, by their sums")
    axes.set_ylabel(f"{section['shape'][0]} evaluation rollouts")
    bar = figure.colorbar(drawn, ax=axes, fraction=0.05, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    in_units(bar.ax.yaxis, [ends.get("zmax")], "contribution", "nats")
    return figure
