"""Charts of what changed the entropy: rollouts, tokens, cells of probability x advantage, pairs."""

from __future__ import annotations

from entropy_experiments.report.html.marks import (
    Figure,
    Trace,
    across,
    cell_text,
    figure_of,
    power_of,
    symmetric,
)
from entropy_experiments.report.sections import (
    CovarianceCells,
    CovarianceSection,
    MatrixSection,
    RolloutsSection,
)
from entropy_experiments.report.words import plain, unit_of

WHISKERS = 150
"""Rollouts with error bars drawn; more would be a grey smear."""
FULL = 0.99
"""Share of the matrix' cells below the full colour: single pairs are extreme."""
DIVERGING = [[0, "$destroy"], [0.5, "$paper"], [1, "$create"]]


def by_rollout(section: RolloutsSection) -> Figure:
    """Every update rollout, from most destroying to most creating."""
    rows = section["rows"]
    whiskers = len(rows) <= WHISKERS
    traces = []
    place = {row["rollout"]: at for at, row in enumerate(rows, start=1)}
    for name, colour, keep in (
        ("lowers entropy", "$destroy", lambda row: row.get("stable") and row["value"] < 0),
        ("raises entropy", "$create", lambda row: row.get("stable") and row["value"] > 0),
        ("sign unsure", "$unsure", lambda row: not row.get("stable")),
    ):
        some = [row for row in rows if keep(row)]
        if not some:
            continue
        trace: Trace = {
            "x": [place[row["rollout"]] for row in some],
            "y": [row["value"] for row in some],
            "mode": "markers",
            "marker": {"color": colour, "size": 6 if len(rows) <= 600 else 4},
            "customdata": [[row["rollout"], plain(row.get("stderr"), 1)] for row in some],
            "hovertemplate": "rollout %{customdata[0]}: %{y:.2e} ± %{customdata[1]}<extra></extra>",
            "name": name,
        }
        if whiskers:
            trace["error_y"] = {
                "type": "data",
                "array": [row.get("stderr") or 0.0 for row in some],
                "color": colour,
                "thickness": 1,
                "width": 0,
            }
        traces.append(trace)
    return figure_of(
        traces,
        330,
        shapes=[across(0.0)],
        xaxis={"title": {"text": "update rollouts, in order of influence"}, "showgrid": False},
        yaxis={"title": {"text": "influence, nats"}},
        showlegend=True,
    )


def points(section: CovarianceSection) -> Figure:
    """Single tokens: influence against probability, by the advantage's sign."""
    at = section["points"]
    traces = []
    for name, symbol, keep in (
        ("sign unsure", "circle", lambda a, sure: not sure),
        ("advantage < 0", "triangle-down-open", lambda a, sure: sure and a < 0),
        ("advantage > 0", "triangle-up", lambda a, sure: sure and a >= 0),
    ):
        colour = "$unsure" if symbol == "circle" else "$ink"
        some = [
            i for i, (a, sure) in enumerate(zip(at["advantage"], at["stable"])) if keep(a, sure)
        ]
        if not some:
            continue
        traces.append(
            {
                "x": [at["probability"][i] for i in some],
                "y": [at["influence"][i] for i in some],
                "customdata": [[at["rollout"][i], at["k"][i], at["advantage"][i]] for i in some],
                "mode": "markers",
                "marker": {"color": colour, "symbol": symbol, "size": 6, "opacity": 0.6},
                "hovertemplate": "p %{x:.3f}, A %{customdata[2]:.2f}: %{y:.2e}<br>rollout "
                "%{customdata[0]}, token %{customdata[1]}<extra></extra>",
                "name": name,
            }
        )
    return figure_of(
        traces,
        360,
        shapes=[across(0.0)],
        xaxis={"title": {"text": "probability of the token"}, "range": [-0.02, 1.02]},
        yaxis={"title": {"text": "influence, nats"}},
        showlegend=True,
    )


def cells(section: CovarianceCells) -> Figure:
    """Sums over cells of probability and advantage."""
    shown = [
        [None if not count else value for value, count in zip(*row)]
        for row in zip(section["influence"], section["tokens"])
    ]
    power = power_of(section["influence"])
    words = [
        ["" if value is None else cell_text(value / 10.0**power) for value in row] for row in shown
    ]
    return figure_of(
        [
            {
                "type": "heatmap",
                "x": section["probability"],
                "y": section["advantage"],
                "z": shown,
                "text": words,
                "texttemplate": "%{text}",
                "textfont": {"size": 10, "color": "$ink"},
                "customdata": section["tokens"],
                "colorscale": DIVERGING,
                "zmid": 0,
                **symmetric(section["influence"], 1.0),
                "showscale": False,
                "xgap": 2,
                "ygap": 2,
                "hovertemplate": "p %{x}, A %{y}<br>%{z:.3g} nats, %{customdata} tokens"
                "<extra></extra>",
            }
        ],
        360,
        xaxis={
            "title": {"text": f"probability (sums in {unit_of(power)}nats)"},
            "type": "category",
            "showgrid": False,
            "tickangle": 0,
            "tickfont": {"size": 10},
            "ticks": "",
        },
        yaxis={
            "title": {"text": "advantage"},
            "type": "category",
            "showgrid": False,
            "ticks": "",
            "tickfont": {"size": 10},
        },
    )


def matrix(section: MatrixSection) -> Figure:
    """Contributions of pairs; rows and columns in order of their sums."""
    rows = len(section["values"])
    places = {"type": "category", "showgrid": False, "showticklabels": False, "ticks": ""}
    return figure_of(
        [
            {
                "type": "heatmap",
                "x": [f"#{i}" for i in section["columns"]],
                "y": [f"#{i}" for i in section["rows"]],
                # As many digits as pointing at a cell shows: most of a page's data is here.
                "z": [[float(f"{value:.3g}") for value in row] for row in section["values"]],
                "colorscale": DIVERGING,
                "zmid": 0,
                **symmetric(section["values"], FULL),
                "colorbar": {
                    "thickness": 8,
                    "outlinewidth": 0,
                    "exponentformat": "e",
                    "nticks": 5,
                    "tickfont": {"size": 10},
                },
                "hovertemplate": "update rollout %{x}, evaluation rollout %{y}: %{z:.2e}"
                "<extra></extra>",
            }
        ],
        max(300, min(560, 120 + 5 * rows)),
        xaxis={"title": {"text": f"{section['shape'][1]} update rollouts"}, **places},
        yaxis={
            "title": {"text": f"{section['shape'][0]} evaluation rollouts"},
            **places,
            "autorange": "reversed",
        },
    )
