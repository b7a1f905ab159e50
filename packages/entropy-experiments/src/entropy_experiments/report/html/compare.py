"""Runs side by side as one HTML page: the tables of `report.compare`, and four drawings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Literal

from entropy_experiments.report.compare import PAIR, ComparedRun, Comparison, compare, tables
from entropy_experiments.report.html.marks import Figure, Trace, across, figure_of, line
from entropy_experiments.report.html.page import checked, drawn, written

Shown = Literal["predicted", "measured", "fresh"]
HUES: dict[Shown, str] = {"predicted": "$accent", "measured": "$ink", "fresh": "$muted"}


def write_comparison(runs: Sequence[str | Path], path: str | Path) -> Path:
    """Write the page and return its path."""
    checked()
    return written(comparison_page(compare(runs)), Path(path))


def comparison_page(comparison: Comparison) -> str:
    return drawn(
        "templates/compare.html.j2",
        comparison_figures(comparison),
        found=comparison,
        tables=tables(comparison),
        title=f"{len(comparison['runs'])} runs side by side",
    )


def comparison_figures(comparison: Comparison) -> dict[str, Figure]:
    runs = comparison["runs"]
    out = {"changes": _changes(runs, comparison["unit"])}
    if comparison["validation"]:
        out["validation"] = _validation(runs, comparison["unit"])
    if comparison["scaling"]:
        out["scaling"] = _scaling(runs)
    if any(row["weights"] for row in runs):
        out["weights"] = _weights(runs)
    return out


def _changes(runs: Sequence[ComparedRun], unit: str) -> Figure:
    """Predicted and measured of each run, beside each other."""
    traces = []
    for place, name in enumerate(HUES):
        some = [(at, row, one) for at, row in enumerate(runs) if (one := row[name])]
        if some:
            shift = (place - 1) * 0.12
            bars = [one["interval"] for _, _, one in some]
            values = [one["value"] for _, _, one in some]
            traces.append(
                {
                    "x": [at + shift for at, _, _ in some],
                    "y": values,
                    "error_y": _bars(values, bars, HUES[name]),
                    "mode": "markers",
                    "marker": {"color": HUES[name], "size": 8},
                    "name": f"{name}, 95 %",
                    "text": [_text(row["label"]) for _, row, _ in some],
                    "hovertemplate": "%{text}: %{y:.3g}<extra>" + name + "</extra>",
                }
            )
    return figure_of(
        traces,
        340,
        shapes=[across(0.0)],
        xaxis=_names(runs),
        yaxis={"title": {"text": f"entropy change, nats per {unit}"}},
        showlegend=True,
    )


def _validation(runs: Sequence[ComparedRun], unit: str) -> Figure:
    """Predicted against measured; on the line they agree."""
    both = [(row, m, p) for row in runs if (p := row["predicted"]) and (m := row["measured"])]
    x, y = [m["value"] for _, m, _ in both], [p["value"] for _, _, p in both]
    bars = [one["interval"] or () for _, m, p in both for one in (m, p)]
    reach = [*x, *y, 0.0, *(end for bar in bars for end in bar)]
    low, high = min(reach), max(reach)
    colour = "$accent"
    trace = {
        "x": x,
        "y": y,
        "error_x": _bars(x, [m["interval"] for _, m, _ in both], colour),
        "error_y": _bars(y, [p["interval"] for _, _, p in both], colour),
        "mode": "markers",
        "marker": {"color": colour, "size": 8},
        "text": [_text(row["label"]) for row, _, _ in both],
        "hovertemplate": "%{text}<br>measured %{x:.3g}, predicted %{y:.3g}<extra></extra>",
        "name": "runs",
        "showlegend": False,
    }
    same = line([low, high], [low, high], "predicted = measured", "$muted", dash="dot", width=1)
    return figure_of(
        [same, trace],
        340,
        xaxis={"title": {"text": f"measured, nats per {unit}"}},
        yaxis={"title": {"text": "predicted"}},
        showlegend=True,
    )


def _scaling(runs: Sequence[ComparedRun]) -> Figure:
    """Standard errors over the number of evaluation prompts, both in powers."""
    traces, ends = [], []
    for name in PAIR:
        some = sorted(
            (size, stderr)
            for row in runs
            if (size := row["B_E"]) and (one := row[name]) and (stderr := one["stderr"])
        )
        if some:
            sizes, errors = zip(*some)
            trace = line(sizes, errors, name, HUES[name])
            traces.append({**trace, "mode": "lines+markers", "marker": {"size": 7}})
            ends.append((sizes, errors))
    sizes, errors = ends[0]
    ideal = [errors[0] * (sizes[0] / size) ** 0.5 for size in sizes]
    traces.append(line(sizes, ideal, "1/√B_E", "$muted", dash="dot", width=1))
    ticks = sorted({size for end, _ in ends for size in end})
    axis = {"type": "log", "tickvals": ticks, "ticktext": [str(size) for size in ticks]}
    return figure_of(
        traces,
        320,
        xaxis={"title": {"text": "evaluation prompts B_E"}, **axis},
        yaxis={"title": {"text": "standard error, nats"}, "type": "log"},
        showlegend=True,
    )


def _weights(runs: Sequence[ComparedRun]) -> Figure:
    """The effective share of the rollouts."""
    share = [None if (one := row["weights"]) is None else one["ESS_fraction"] for row in runs]
    trace = {
        "type": "bar",
        "x": list(range(len(runs))),
        "y": share,
        "marker": {"color": "$accent"},
        "width": 0.5,
        "text": [_text(row["label"]) for row in runs],
        "textposition": "none",
        "hovertemplate": "%{text}: %{y:.3f}<extra></extra>",
        "showlegend": False,
    }
    return figure_of(
        [trace],
        280,
        xaxis=_names(runs),
        yaxis={"title": {"text": "ESS / rollouts"}, "range": [0, 1.02]},
    )


def _names(runs: Sequence[ComparedRun]) -> Trace:
    return {
        "tickvals": list(range(len(runs))),
        "ticktext": [_text(row["label"]) for row in runs],
        "showgrid": False,
        "range": [-0.5, len(runs) - 0.5],
    }


def _text(label: str) -> str:
    """plotly reads tags in its texts."""
    return escape(label, quote=False)


def _bars(values: Sequence[float], bars: Sequence[Sequence[float] | None], colour: str) -> Trace:
    ends = [bar or (value, value) for value, bar in zip(values, bars)]
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value for value, (_, high) in zip(values, ends)],
        "arrayminus": [value - low for value, (low, _) in zip(values, ends)],
        "color": colour,
        "thickness": 1.2,
        "width": 0,
    }
