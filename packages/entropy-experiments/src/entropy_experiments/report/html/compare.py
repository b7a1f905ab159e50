"""Runs side by side as one HTML page: the tables of `report.compare_tables`, and four drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from entropy_experiments.report.compare import compare
from entropy_experiments.report.compare_tables import tables
from entropy_experiments.report.html.marks import Figure, across, figure_of, line
from entropy_experiments.report.html.page import checked, drawn, written

HUES = {"predicted": "$accent", "measured": "$ink", "fresh": "$muted"}


def write_comparison(runs: Sequence[str | Path], path: str | Path) -> Path:
    """Write the page and return its path."""
    checked()
    return written(comparison_page(compare(runs)), Path(path))


def comparison_page(found: Mapping[str, Any]) -> str:
    return drawn(
        "templates/compare.html.j2",
        comparison_figures(found),
        found=found,
        tables=tables(found),
        title=f"{len(found['runs'])} runs side by side",
    )


def comparison_figures(found: Mapping[str, Any]) -> dict[str, Figure]:
    runs = found["runs"]
    out = {"changes": _changes(runs, found["unit"])}
    if found["validation"]:
        out["validation"] = _validation(runs, found["unit"])
    if found["scaling"]:
        out["scaling"] = _scaling(runs)
    if any(row["weights"] for row in runs):
        out["weights"] = _weights(runs)
    return out


def _changes(runs: Sequence[Mapping[str, Any]], unit: str) -> Figure:
    """Predicted and measured of each run, beside each other."""
    traces = []
    for place, name in enumerate(HUES):
        some = [(at, row) for at, row in enumerate(runs) if row[name]]
        if some:
            shift = (place - 1) * 0.12
            bars = [row[name]["interval"] for _, row in some]
            values = [row[name]["value"] for _, row in some]
            traces.append(
                {
                    "x": [at + shift for at, _ in some],
                    "y": values,
                    "error_y": _bars(values, bars, HUES[name]),
                    "mode": "markers",
                    "marker": {"color": HUES[name], "size": 8},
                    "name": f"{name}, 95 %",
                    "text": [_text(row["label"]) for _, row in some],
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


def _validation(runs: Sequence[Mapping[str, Any]], unit: str) -> Figure:
    """Predicted against measured; on the line they agree."""
    both = [row for row in runs if row["predicted"] and row["measured"]]
    x, y = ([row[name]["value"] for row in both] for name in ("measured", "predicted"))
    bars = [row[name]["interval"] or () for row in both for name in ("measured", "predicted")]
    reach = [*x, *y, 0.0, *(end for bar in bars for end in bar)]
    low, high = min(reach), max(reach)
    colour = "$accent"
    trace = {
        "x": x,
        "y": y,
        "error_x": _bars(x, [row["measured"]["interval"] for row in both], colour),
        "error_y": _bars(y, [row["predicted"]["interval"] for row in both], colour),
        "mode": "markers",
        "marker": {"color": colour, "size": 8},
        "text": [_text(row["label"]) for row in both],
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


def _scaling(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Standard errors over the number of evaluation prompts, both in powers."""
    traces, ends = [], []
    for name in ("predicted", "measured"):
        some = sorted(
            (row["B_E"], row[name]["stderr"])
            for row in runs
            if row["B_E"] and row[name] and row[name]["stderr"]
        )
        if some:
            sizes, errors = zip(*some)
            trace = line(sizes, errors, name, HUES[name])
            traces.append({**trace, "mode": "lines+markers", "marker": {"size": 7}})
            ends.append((sizes, errors))
    sizes, errors = ends[0]
    ideal = [errors[0] * (sizes[0] / size) ** 0.5 for size in sizes]
    traces.append(line(sizes, ideal, "1/√B_E", "$muted", dash="dot", width=1))
    ticks = sorted({size for found, _ in ends for size in found})
    axis = {"type": "log", "tickvals": ticks, "ticktext": [str(size) for size in ticks]}
    return figure_of(
        traces,
        320,
        xaxis={"title": {"text": "evaluation prompts B_E"}, **axis},
        yaxis={"title": {"text": "standard error, nats"}, "type": "log"},
        showlegend=True,
    )


def _weights(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """The effective share of the rollouts."""
    share = [(row["weights"] or {}).get("ESS_fraction") for row in runs]
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


def _names(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "tickvals": list(range(len(runs))),
        "ticktext": [_text(row["label"]) for row in runs],
        "showgrid": False,
        "range": [-0.5, len(runs) - 0.5],
    }


def _text(label: str) -> str:
    """plotly reads tags in its texts."""
    return escape(label, quote=False)


def _bars(values: Sequence[float], bars: Sequence[Any], colour: str) -> dict[str, Any]:
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
