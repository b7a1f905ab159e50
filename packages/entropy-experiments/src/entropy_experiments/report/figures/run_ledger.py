"""Figures of a run's ledger: who changed entropy and reward, and what a unit of reward cost.

account_GROUPING   what the batches of each group did, summed over the run; below it the reward
rates_GROUPING     nats per unit of reward of each group, with one standard error
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from entropy_experiments.report.figures.style import (
    INK,
    MUTED,
    in_units,
    legend_above,
    panels,
    zero_line,
)
from entropy_experiments.report.html.run_ledger import PALETTE, group_name, short, words_of_unit
from entropy_experiments.report.run_ledger import Grouping, RunLedgerView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST = 24
"""Characters of a group's name."""
RATE_ROW, LEGEND_ROW = 0.24, 0.08
"""Inches."""
LETTERS = {1: 52, 2: 112}
"""That fit into a row of the legend, by the figure's columns."""
ALL = "all batches"


def run_ledger_figures(view: RunLedgerView, *, columns: int) -> dict[str, Figure]:
    """By file name; a grouping none of whose groups has a sure reward has no rates."""
    out: dict[str, Figure] = {}
    for grouping in view["groupings"]:
        out[f"account_{grouping['key']}"] = account_figure(view, grouping, columns=columns)
        rates = rates_figure(view, grouping, columns=columns)
        if rates is not None:
            out[f"rates_{grouping['key']}"] = rates
    return out


def account_figure(view: RunLedgerView, grouping: Grouping, *, columns: int) -> Figure:
    """Entropy above and, where there are rewards, reward below, on the same steps."""
    rewarded = view["summary"]["total"]["reward"] is not None
    names = _names(view, grouping)
    entries = max(1, LETTERS[columns] // (max(map(len, [*names, ALL])) + 6))
    rows = -(-(len(names) + 1) // entries)
    figure, grid = panels(1 + rewarded, columns=columns, height=1.7 + LEGEND_ROW * rows)
    _stack(grid[0], view, names, [group["dH_by_bin"] for group in grouping["groups"]])
    unit = words_of_unit(view["summary"])
    in_units(grid[0].yaxis, [_height(grid[0])], "entropy", unit)
    legend_above(grid[0], entries)
    if rewarded:
        _stack(grid[1], view, names, [group["dR_by_bin"] or [] for group in grouping["groups"]])
        in_units(grid[1].yaxis, [_height(grid[1])], "reward", "")
    figure.align_ylabels(grid)
    grid[-1].set_xlabel("optimizer step that learned from the batch")
    return figure


def _stack(
    axes: Axes, view: RunLedgerView, names: Sequence[str], by_group: Sequence[Sequence[float]]
) -> None:
    """Sums so far, what raises above zero and what lowers below it."""
    from matplotlib.ticker import MaxNLocator

    bins = view["bins"]
    at = np.array([(low + high) / 2 for low, high in bins])
    width = 0.8 * (bins[0][1] - bins[0][0] + 1)
    above, below, net = (np.zeros(len(bins)) for _ in range(3))
    for place, (name, by_bin) in enumerate(zip(names, by_group, strict=True)):
        values = np.cumsum(by_bin)
        bottom = np.where(values >= 0, above, below)
        colour = PALETTE[place % len(PALETTE)]
        axes.bar(at, values, width, bottom=bottom, color=colour, linewidth=0, label=name)
        above = above + np.maximum(values, 0)
        below = below + np.minimum(values, 0)
        net = net + values
    axes.plot(at, net, color=INK, label=ALL)
    zero_line(axes)
    axes.use_sticky_edges = False  # bars would end on the frame
    axes.margins(y=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def _height(axes: Axes) -> float:
    return max(map(abs, axes.get_ylim()))


def rates_figure(view: RunLedgerView, grouping: Grouping, *, columns: int) -> Figure | None:
    """None: no group's change of reward is sure."""
    some = [
        (name, rate)
        for name, group in zip(_names(view, grouping), grouping["groups"], strict=True)
        if (rate := group["rate"]) is not None
    ]
    if not some:
        return None
    figure, (axes,) = panels(1, columns=columns, height=0.6 + RATE_ROW * len(some))
    places = range(len(some))
    values = [rate["value"] for _, rate in some]
    errors = [rate["stderr"] or 0.0 for _, rate in some]
    axes.errorbar(values, places, xerr=errors, fmt="o", color=INK, ecolor=MUTED, elinewidth=0.9)
    zero_line(axes, upright=True)
    axes.set_yticks(list(places), [name for name, _ in some])
    axes.set_ylim(len(some) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    in_units(axes.xaxis, values, "exchange rate ± s.e.", "nats per unit of reward")
    return figure


def _names(view: RunLedgerView, grouping: Grouping) -> list[str]:
    name_of = group_name(view)
    return [short(name_of(grouping, group), LONGEST) for group in grouping["groups"]]
