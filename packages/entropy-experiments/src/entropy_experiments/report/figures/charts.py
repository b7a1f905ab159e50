"""Figures of one run: its entropy over the steps, the step's curve, its ledger, the what-ifs.

trajectory   fresh rollouts, and the changes summed from the first checkpoint on
curve        predicted against measured over the step size, with noise floor and linear range
ledger       a waterfall: from zero to the prediction by lines, and on to the measurement
what_if      the step as it was and every other step: predicted and, where made, measured
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from entropy_experiments.report.figures.style import (
    ACCENT,
    CREATE,
    DESTROY,
    FLOOR,
    INK,
    LINE,
    MUTED,
    UNSURE,
    WASH,
    in_units,
    legend_above,
    panels,
    whiskers,
    zero_line,
)
from entropy_experiments.report.sections import Book, BookRow, Curve, Steps, WhatIfSection, answered
from entropy_experiments.report.trajectory import last_step, summed_changes
from entropy_experiments.results import Change

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
GRID = 41
LEDGER_ROW = 0.21
BAR = 0.62
TITLES = {"entropy": "entropy", "reward": "expected reward"}
ANSWER_ROW = 0.26
LONGEST = 28


def trajectory_figure(run: Steps, *, columns: int) -> Figure:
    """`run`: what `read_trajectory` gives. Rewards stand below, on the same steps."""
    steps = run["steps"]
    rewards = [step["reward"] for step in steps if step["reward"] is not None]
    both = len(rewards) == len(steps)
    figure, grid = panels(1 + both, columns=columns, height=1.6 if both else 2.5)
    axes = grid[0]
    at = [*(step["step"] for step in steps), last_step(run)]
    levels = [*(step["level"] for step in steps), run["last"]]
    points = [(x, level) for x, level in zip(at, levels, strict=True) if level is not None]
    where, fresh = [x for x, _ in points], [level["value"] for _, level in points]
    first = fresh[0]
    low, high = zip(*(level["interval"] or [level["value"]] * 2 for _, level in points))
    axes.fill_between(where, low, high, color=LINE, linewidth=0)
    named = run.get("band", "fresh rollouts, 95 %")
    axes.plot(where, fresh, color=MUTED, linewidth=0.8, label=named)
    lines: tuple[tuple[Change, str, str, str], ...] = (
        ("predicted", "predicted", "-", ACCENT),
        ("second_order", "second order", ":", ACCENT),
        ("measured", "measured", "--", DESTROY),
    )
    for name, label, style, colour in lines:
        sums = summed_changes(run, name)
        if sums is None:
            continue  # the page says why
        summed = [first, *(first + change for change in sums)]
        axes.plot(at, summed, style, color=colour, label=f"{label}, summed")
    axes.set_ylabel(f"entropy, nats per {run['unit']}")
    axes.set_ylim(bottom=0)
    axes.set_xlim(at[0], at[-1])
    legend_above(axes, 3 if columns == 2 else 2)
    if both:
        figure.set_size_inches(figure.get_figwidth(), 3.2)
        axes.get_gridspec().set_height_ratios([2.6, 1])  # type: ignore[union-attr]
        axes.tick_params(labelbottom=False)
        below = grid[1]
        below.plot(at[:-1], rewards, color=MUTED, linewidth=1.0)
        below.set(xlim=axes.get_xlim(), ylabel="reward")
        figure.align_ylabels(grid)
    grid[-1].set_xlabel("optimizer step")
    return figure


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


def ledger_figure(books: Sequence[Book], *, columns: int) -> Figure:
    """Entropy and, where there is one, reward: beside each other on two columns, else below."""
    height = 0.75 + LEDGER_ROW * max(len(book["rows"]) for book in books)
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


def what_if_figure(section: WhatIfSection, *, columns: int) -> Figure | None:
    """None: no question has an answer."""
    answers = answered(section)
    if not answers:
        return None
    names = ["as it was", *(_short(one.name) for one in answers)]
    totals = [answers[0].prediction["recorded"], *(one.prediction["total"] for one in answers)]
    figure, (axes,) = panels(1, columns=columns, height=0.85 + ANSWER_ROW * len(names))
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
