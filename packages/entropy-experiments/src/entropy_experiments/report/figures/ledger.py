"""The ledger as a waterfall: from zero to the prediction by lines, and on to the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from entropy_experiments.report.figures.style import (
    CREATE,
    DESTROY,
    INK,
    MUTED,
    in_units,
    panels,
    whiskers,
    zero_line,
)
from entropy_experiments.report.sections import Book, BookRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.21
BAR = 0.62
TITLES = {"entropy": "entropy", "reward": "expected reward"}


def ledger_figure(books: Sequence[Book], *, columns: int) -> Figure:
    """Entropy and, where there is one, reward: beside each other on two columns, else below."""
    height = 0.75 + ROW * max(len(book["rows"]) for book in books)
    figure, grid = panels(
        len(books), columns=columns, height=height, across=len(books) if columns == 2 else 1
    )
    for axes, book in zip(grid, books):
        _waterfall(axes, book)
    return figure


def _waterfall(axes: Axes, book: Book) -> None:
    rows, at = book["rows"], range(len(book["rows"]))
    ends = [row["start"] + row["value"] for row in rows]
    axes.barh(
        at,
        [row["value"] for row in rows],
        left=[row["start"] for row in rows],
        height=BAR,
        color=[_colour(row, book["name"]) for row in rows],
    )
    # An interval is about the line's own value: it moves with the bar's start.
    bars = [
        None if row["interval"] is None else [row["start"] + end for end in row["interval"]]
        for row in rows
    ]
    style = {"fmt": "none", "ecolor": MUTED, "elinewidth": 1.0}
    axes.errorbar(ends, at, xerr=whiskers(ends, bars), **style)
    for place, end in enumerate(ends[:-1]):
        edge = BAR / 2
        axes.plot([end, end], [place + edge, place + 1 - edge], color=MUTED, linewidth=0.6)
    zero_line(axes, upright=True)
    axes.set_yticks(list(at), [row["name"] for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows):
        label.set_fontweight("bold" if row["kind"] == "total" else "normal")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    unit = book["unit"] if book["name"] == "entropy" else ""
    known = [end for bar in bars if bar for end in bar]
    in_units(axes.xaxis, [*ends, *known], TITLES.get(book["name"], book["name"]), unit)


def _colour(row: BookRow, book: str) -> str:
    if row["kind"] == "total":
        return INK
    if book != "entropy":
        return MUTED
    return DESTROY if row["value"] < 0 else CREATE
