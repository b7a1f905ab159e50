"""Figures for papers: of one run, of what changed its entropy, and of checkpoints over steps.

trajectory   fresh rollouts, and the changes summed from the first checkpoint on
curve        predicted against measured over the step size, with noise floor and linear range
ledger       a waterfall: from zero to the prediction by lines, and on to the measurement
what_if      the step as it was and every other step: predicted and, where made, measured
rollouts     every update rollout, from most destroying to most creating
points       every token by probability and advantage; cells: the sums of its groups
matrix       whom each update rollout moved
evaluation   checkpoints: passes, form, length, entropy; a panel each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from entropy_experiments.report.figures.style import (
    ACCENT,
    CREATE,
    DESTROY,
    DIVERGING,
    FLOOR,
    INK,
    LINE,
    MUTED,
    UNSURE,
    WASH,
    image,
    in_units,
    legend_above,
    panels,
    paper_style,
    whiskers,
    zero_line,
)
from entropy_experiments.report.html.influence_charts import WHISKERS
from entropy_experiments.report.html.marks import cell_text, power_of, symmetric
from entropy_experiments.report.sections import (
    Book,
    BookRow,
    CovarianceCells,
    CovarianceSection,
    Curve,
    MatrixSection,
    RolloutsSection,
    Steps,
    WhatIfSection,
    answered,
)
from entropy_experiments.report.trajectory import last_step, summed_changes
from entropy_experiments.report.words import unit_of
from entropy_experiments.results import Change, EvaluatedCheckpoint, EvaluationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
GRID = 41
LEDGER_ROW = 0.21
BAR = 0.62
TITLES = {"entropy": "entropy", "reward": "expected reward"}
ANSWER_ROW = 0.26
LONGEST = 28
COLOURS = (ACCENT, DESTROY, CREATE, MUTED, INK)
NAMED = 12
"""Checkpoints whose names fit under an axis."""


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
