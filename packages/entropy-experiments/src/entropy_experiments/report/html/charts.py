"""The drawings of a report as plotly figures: plain dicts, no plotly in Python.

Colours are names ("$destroy", "$create", "$accent", "$ink", ...) that report.js replaces by the
page's own, light or dark. Orange lowers the entropy, blue raises it: a pair that eyes without red
or green tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from entropy_experiments.report.html.influence_charts import by_rollout, cells, matrix, points
from entropy_experiments.report.html.marks import (
    Figure,
    Trace,
    across,
    band_of,
    edge,
    figure_of,
    interval_text,
    line,
    note,
    segment,
    upright,
)
from entropy_experiments.report.sections import (
    Book,
    BookRow,
    Curve,
    CurvePoint,
    ReportData,
    Steps,
    WhatIfSection,
    answered,
)
from entropy_experiments.report.trajectory import last_step, summed_changes
from entropy_experiments.results import Change

WHISKERS = 150
"""Probed steps whose error bars are drawn at full weight."""
SAME_LEFT = {"l": 64}
"""Of drawings that stand above each other and share their steps."""


def figures(data: ReportData) -> dict[str, Figure]:
    """By name; a section without data has none."""
    out: dict[str, Figure] = {}
    if run := data.get("trajectory"):
        out |= {"trajectory": trajectory(run), **rewards(run), **probed_steps(run)}
    if over_eta := data.get("curve"):
        out["curve"] = curve(over_eta, data["unit"])
    if ledger := data.get("ledger"):
        out |= {f"ledger_{book['name']}": waterfall(book) for book in ledger["books"]}
    if by := data.get("rollouts"):
        out["rollouts"] = by_rollout(by)
    if pushed := data.get("covariance"):
        out |= {"points": points(pushed), "cells": cells(pushed["cells"])}
    if questions := data.get("what_if"):
        out |= what_if(questions)
    if pairs := data.get("matrix"):
        out["matrix"] = matrix(pairs)
    return out


def curve(section: Curve, unit: str) -> Figure:
    """Measured points with their intervals on the predicted line with its band."""
    lr, predicted, bend = section["lr"], section["predicted"], section["curvature"]
    assert predicted is not None  # a curve is made of a prediction
    points = section["points"]
    reach = max([lr, *(point["eta"] for point in points)]) * 1.06
    grid = [reach * i / 40 for i in range(41)]
    slope = predicted["value"] / lr
    traces: list[Any] = []
    if predicted["interval"] is not None:
        low, high = (end / lr for end in predicted["interval"])
        traces.append(
            {
                "x": [*grid, *reversed(grid)],
                "y": [*(low * x for x in grid), *(high * x for x in reversed(grid))],
                "mode": "lines",  # plotly marks the points of short ones
                "fill": "toself",
                "fillcolor": "$accentwash",
                "line": {"width": 0},
                "hoverinfo": "skip",
                "name": "predicted, 95 %",
                "showlegend": False,
            }
        )
    traces.append(line(grid, [slope * x for x in grid], "predicted", "$accent"))
    if bend is not None:
        curved = [slope * x + bend["value"] * (x / lr) ** 2 for x in grid]
        traces.append(line(grid, curved, "with curvature", "$accent", dash="dot", width=1.5))
    for trusted, name in ((True, "measured, 95 %"), (False, "measured, not trusted")):
        some = [p for p in points if bool(p["trusted"]) == trusted]
        if some:
            traces.append(_measured(some, name, "$ink" if trusted else "$muted", filled=trusted))
    shapes = [across(0.0)]
    notes = []
    straight = section["linear_range"]
    if straight is not None:
        end = min(straight, reach)
        shapes.append(band_of("x", 0, end, "$wash"))
        left = end > reach / 3
        label = "line holds within 10 %" if left else "◂ line holds within 10 %"
        notes.append(note(end, 1, label, "right" if left else "left"))
    floor = section["noise_floor"]
    if floor:
        shapes.append(band_of("y", -floor, floor, "$floor"))
        notes.append({**note(reach, floor, "noise floor", "right"), "yref": "y"})
    return figure_of(
        traces,
        400,
        shapes=shapes,
        annotations=notes,
        xaxis={"title": {"text": "step size η"}, "range": [0, reach]},
        yaxis={"title": {"text": f"entropy change, nats per {unit}"}},
        showlegend=True,
    )


def _measured(points: Sequence[CurvePoint], name: str, colour: str, *, filled: bool) -> Any:
    values = [p["value"] for p in points]
    ends = [p["interval"] or (p["value"], p["value"]) for p in points]
    return {
        "x": [p["eta"] for p in points],
        "y": values,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [high - v for (_, high), v in zip(ends, values)],
            "arrayminus": [v - low for (low, _), v in zip(ends, values)],
            "color": colour,
            "thickness": 1.2,
            "width": 0,
        },
        "mode": "markers",
        "marker": {"color": colour if filled else "$paper", "size": 8, "line": edge(colour)},
        "name": name,
        "hovertemplate": "η %{x:.3g}: %{y:.3g}<extra></extra>",
    }


def waterfall(book: Book) -> Figure:
    """From zero to the prediction line by line, and on to the measurement."""
    rows = book["rows"]
    entropy = book["name"] == "entropy"

    def colour(row: BookRow) -> str:
        if row["kind"] == "total":
            return "$ink"
        if not entropy:
            return "$muted"
        return "$destroy" if row["value"] < 0 else "$create"

    ends = [row["start"] + row["value"] for row in rows]
    intervals = [row["interval"] for row in rows]
    errors = [
        (0.0, 0.0) if bar is None else (row["value"] - bar[0], bar[1] - row["value"])
        for row, bar in zip(rows, intervals)
    ]
    names = [row["name"] for row in rows]
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "base": [row["start"] for row in rows],
        "x": [row["value"] for row in rows],
        "marker": {"color": [colour(row) for row in rows], "line": {"width": 0}},
        "width": 0.62,
        "customdata": [interval_text(bar) for bar in intervals],
        "hovertemplate": "%{y}: %{x:.3g}<br>%{customdata}<extra></extra>",
        "showlegend": False,
    }
    whiskers = {
        "x": ends,
        "y": names,
        "mode": "markers",
        "marker": {"size": 1, "color": "$ink"},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high for _, high in errors],
            "arrayminus": [low for low, _ in errors],
            "color": "$whisker",
            "thickness": 1.2,
            "width": 0,
        },
        "hoverinfo": "skip",
        "showlegend": False,
    }
    steps = [
        {
            **segment(end, at + 0.31, end, at + 0.69),
            "line": {"color": "$muted", "width": 1},
        }
        for at, end in enumerate(ends[:-1])
    ]
    return figure_of(
        [bars, whiskers],
        60 + 34 * len(rows),
        shapes=[upright(0.0), *steps],
        xaxis={"nticks": 5},
        yaxis={"autorange": "reversed", "showgrid": False, "ticks": ""},
    )


def what_if(section: WhatIfSection) -> dict[str, Figure]:
    """The step as it was and every other step: predicted and, where made, measured."""
    answers = answered(section)
    if not answers:
        return {}
    # plotly reads tags in its texts, and `drop=p<0.1` has the beginning of one.
    names = ["the step as it was", *(escape(one.name, quote=False) for one in answers)]
    totals = [answers[0].prediction["recorded"], *(one.prediction["total"] for one in answers)]
    traces = [
        {
            "x": totals,
            "y": names,
            "mode": "markers",
            "marker": {
                "symbol": "diamond-open",
                "size": 10,
                "color": "$accent",
                "line": edge("$accent"),
            },
            "name": "predicted",
            "hovertemplate": "%{y}: predicted %{x:.4g}<extra></extra>",
        }
    ]
    steps = [(names[0], section["measured"])] + [
        (name, one.measured) for name, one in zip(names[1:], answers) if one.measured
    ]
    if steps:
        measured = [one for _, one in steps]
        values = [m["value"] for m in measured]
        ends = [m["interval"] or (m["value"], m["value"]) for m in measured]
        traces.append(
            {
                "x": values,
                "y": [name for name, _ in steps],
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [high - v for (_, high), v in zip(ends, values)],
                    "arrayminus": [v - low for (low, _), v in zip(ends, values)],
                    "color": "$ink",
                    "thickness": 1.2,
                    "width": 0,
                },
                "mode": "markers",
                "marker": {"size": 8, "color": "$ink"},
                "name": "made and measured, 95 %",
                "hovertemplate": "%{y}: measured %{x:.4g}<extra></extra>",
            }
        )
    figure = figure_of(
        traces,
        110 + 38 * len(names),
        shapes=[{**upright(totals[0]), "line": {"color": "$muted", "width": 1, "dash": "dot"}}],
        xaxis={"title": {"text": "entropy change, nats"}},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": False},
        showlegend=True,
    )
    return {"what_if": figure}


def trajectory(run: Steps) -> Figure:
    """Entropy of fresh rollouts, and both changes summed from the first checkpoint on."""
    steps = run["steps"]
    at = [*(step["step"] for step in steps), last_step(run)]
    # Of a probed training a level may lack.
    points = [
        (x, level)
        for x, level in zip(at, [*(step["level"] for step in steps), run["last"]], strict=True)
        if level is not None
    ]
    where, levels = [x for x, _ in points], [level for _, level in points]
    first = levels[0]["value"]
    ends = [level["interval"] or (level["value"], level["value"]) for level in levels]
    band = {
        "x": [*where, *reversed(where)],
        "y": [*(high for _, high in ends), *(low for low, _ in reversed(ends))],
        "mode": "lines",  # plotly marks the points of short ones
        "fill": "toself",
        "fillcolor": "$wash",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    named = run.get("band", "fresh rollouts, 95 %")
    fresh = line(where, [level["value"] for level in levels], named, "$muted")
    traces = [band, {**fresh, "line": {"color": "$muted", "width": 1.2}}]
    own = _logged(run, "entropy")
    if own:
        trace = line(*own, "training batch, as logged", "$create", width=1)
        traces.append({**trace, "opacity": 0.8})
    lines: tuple[tuple[Change, str, str, str], ...] = (
        ("predicted", "predicted", "$accent", "solid"),
        ("second_order", "predicted, second order", "$accent", "dash"),
        ("measured", "measured", "$ink", "dot"),
    )
    for name, label, colour, dash in lines:
        sums = summed_changes(run, name)
        if sums is None:
            continue  # the page says why
        summed = [first, *(first + change for change in sums)]
        traces.append(line(at, summed, f"{label}, summed", colour, dash=dash))
    # A collapse is drawn down to 0; a run that lost little would be a flat line there.
    collapsed = min(low for low, _ in ends) < 0.5 * max(high for _, high in ends)
    return figure_of(
        traces,
        380,
        margin=SAME_LEFT,
        xaxis={
            # With rewards below on the same steps, theirs says it.
            **({} if rewards(run) else {"title": {"text": "optimizer step"}}),
            "showgrid": False,
            "range": reach_of(run),
        },
        yaxis={
            "title": {"text": f"entropy, nats per {run['unit']}"},
            "rangemode": "tozero" if collapsed else "normal",
        },
        showlegend=True,
    )


def rewards(run: Steps) -> dict[str, Figure]:
    """The batches' mean rewards below the entropy, on the same steps."""
    at = _logged(run, "reward")
    if not at:
        points = [(s["step"], s["reward"]) for s in run["steps"] if s["reward"] is not None]
        at = ([step for step, _ in points], [reward for _, reward in points]) if points else None
    if not at:
        return {}
    figure = figure_of(
        [{**line(*at, "reward", "$ink"), "line": {"color": "$ink", "width": 1.2}}],
        180,
        margin=SAME_LEFT,
        xaxis={"title": {"text": "optimizer step"}, "showgrid": False, "range": reach_of(run)},
        yaxis={"title": {"text": "reward"}, "nticks": 4},
    )
    return {"rewards": figure}


def reach_of(run: Steps) -> list[float]:
    """The first and the last step that anything is known of."""
    steps = [x for values in (run.get("logged") or {}).values() for x, _ in values]
    steps += [run["steps"][0]["step"], last_step(run)]
    return [min(steps), max(steps)]


def _logged(run: Steps, name: str) -> tuple[list[float], list[float]] | None:
    """Steps and values that the trainer itself logged; None: nothing."""
    values = (run.get("logged") or {}).get(name)
    return ([x for x, _ in values], [y for _, y in values]) if values else None


def probed_steps(run: Steps) -> dict[str, Figure]:
    """Every probed step of a training: its change, predicted and measured, with intervals."""
    rows = run.get("probed") or ()
    if not rows:
        return {}
    best = "second_order" if any(row["second_order"] for row in rows) else "predicted"
    many = len(rows) > WHISKERS
    first, last = reach_of(run)
    # Side by side, or the one drawn last would hide the other; less than a step apart.
    aside = min(0.18, (last - first) / 220)
    traces: list[Any] = []
    for name, label, colour, symbol, shift in (
        (best, "predicted", "$accent", "diamond", -aside),
        ("measured", "measured", "$ink", "circle", aside),
    ):
        for trusted in (True, False):
            some = [(r["step"], r[name]) for r in rows if r[name] and r["trusted"] == trusted]
            if not some:
                continue
            values = [one["value"] for _, one in some]
            ends = [one["interval"] or (one["value"], one["value"]) for _, one in some]
            trace: Trace = {
                "x": [step + shift for step, _ in some],
                "y": values,
                "mode": "markers",
                "marker": {
                    "symbol": symbol,
                    "size": 5 if many else 8,
                    "color": colour if trusted else "$paper",
                    "line": edge(colour if trusted else "$warn"),
                },
                "customdata": [[step, interval_text(one["interval"])] for step, one in some],
                "hovertemplate": f"step %{{customdata[0]}}: {label} %{{y:.3g}}"
                f"<br>%{{customdata[1]}}<extra>{'' if trusted else 'not trusted'}</extra>",
                "name": label if trusted else f"{label}, not trusted",
            }
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": [high - v for (_, high), v in zip(ends, values)],
                "arrayminus": [v - low for (low, _), v in zip(ends, values)],
                "color": colour if trusted else "$warn",
                "thickness": 0.5 if many else 1.2,
                "width": 0,
            }
            traces.append(trace)
    margin = max(0.5, (last - first) / 60)  # markers at the ends are whole
    return {
        "steps": figure_of(
            traces,
            360,
            margin=SAME_LEFT,
            shapes=[across(0.0)],
            xaxis={
                "title": {"text": "optimizer step"},
                "showgrid": False,
                "range": [first - margin, last + margin],
            },
            yaxis={"title": {"text": f"change of one step, nats per {run['unit']}"}},
            showlegend=True,
        )
    }
