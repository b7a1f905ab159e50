"""Tasks as pictures: demonstrations, query, target, predictions before and after refinement.

HTML is one file with inline SVG and no script; PNG needs matplotlib. Colours are those in which ARC
is usually drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from arc_refine.evaluate import Outcome
from arc_refine.metrics import write_whole

COLOURS = (
    *("#000000", "#0074d9", "#ff4136", "#2ecc40", "#ffdc00"),
    *("#aaaaaa", "#f012be", "#ff851b", "#7fdbff", "#870c25"),
)
LINES = "#555555"
CELL = 14
SOLVED, UNSOLVED = "solved", "not solved"
STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff; }
section { margin: 0 0 2.5rem; }
h2 { font-size: 1.05rem; margin: 0 0 .5rem; }
.row { display: flex; flex-wrap: wrap; gap: 1.2rem; align-items: flex-start; }
figure { margin: 0; } figcaption { font-size: .8rem; margin-bottom: .2rem; }
.pair { display: flex; gap: .4rem; align-items: center; }
.right { color: #0a7a28; font-weight: 600; } .wrong { color: #a11; }
svg { display: block; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #1b1b1b; }
.right { color: #5fd47d; } .wrong { color: #ff8080; } }
"""


def render(outcomes: Sequence[Outcome], out: str | Path, *, title: str) -> Path:
    """Write .html or .png, by the name of the file."""
    path = Path(out)
    if not outcomes:
        raise ValueError("There is no task to show, expected at least one. Check --task.")
    if path.suffix == ".html":
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page(outcomes, title))
    elif path.suffix == ".png":
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(outcomes, path, title)
    else:
        raise ValueError(f"--out is {path.name!r}, expected a name that ends in .html or .png.")
    return path


def panels(outcome: Outcome) -> list[tuple[str, np.ndarray, str]]:
    """(caption, grid, verdict) of what comes after the demonstrations."""
    verdicts = [SOLVED if e else UNSOLVED for e in (outcome.exact_before, outcome.exact_after)]
    return [
        ("query", outcome.episode.inputs.query, ""),
        ("target", outcome.episode.target, ""),
        (f"before, {_cells(outcome.cells_before)}", outcome.prediction_before, verdicts[0]),
        (f"after, {_cells(outcome.cells_after)}", outcome.prediction_after, verdicts[1]),
    ]


def _cells(share: float) -> str:
    return f"{100 * share:.0f} % of cells right"


def page(outcomes: Sequence[Outcome], title: str) -> str:
    sections = "\n".join(_section(outcome) for outcome in outcomes)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{sections}\n</body></html>\n"
    )


def _section(outcome: Outcome) -> str:
    demos = "".join(
        f'<figure><figcaption>demonstration {n}</figcaption><div class="pair">'
        f"{svg(pair.input)}<span>→</span>{svg(pair.output)}</div></figure>"
        for n, pair in enumerate(outcome.episode.inputs.demos, start=1)
    )
    rest = "".join(
        f"<figure><figcaption>{escape(caption)} {_verdict(words)}</figcaption>{svg(grid)}</figure>"
        for caption, grid, words in panels(outcome)
    )
    return (
        f'<section id="{escape(outcome.task_id, quote=True)}">'
        f"<h2>task {escape(outcome.task_id)}</h2>"
        f'<div class="row">{demos}</div><div class="row">{rest}</div></section>'
    )


def _verdict(words: str) -> str:
    kind = "right" if words == SOLVED else "wrong"
    return f'<span class="{kind}">{words}</span>' if words else ""


def svg(grid: np.ndarray) -> str:
    """A grid as inline SVG, its text for those who do not see it."""
    height, width = grid.shape
    cell = max(4, min(CELL, 300 // max(height, width)))
    cells = "".join(
        f'<rect x="{x * cell}" y="{y * cell}" width="{cell}" height="{cell}" '
        f'fill="{COLOURS[int(grid[y, x])]}"/>'
        for y in range(height)
        for x in range(width)
    )
    words = f"{height} by {width} grid"
    return (
        f'<svg role="img" aria-label="{words}" width="{width * cell + 1}" '
        f'height="{height * cell + 1}" stroke="{LINES}" stroke-width="0.6">{cells}</svg>'
    )


def picture(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "A .png needs matplotlib, which is not installed. Install entropy-experiments[plot], "
            "or give --out a name that ends in .html."
        ) from None
    rows = [_strip(outcome) for outcome in outcomes]
    columns = max(map(len, rows))
    figure = Figure(figsize=(1.5 * columns, 1.9 * len(rows) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    colours = ListedColormap(COLOURS)
    for row, strip in enumerate(rows):
        for column in range(columns):
            ax: Any = axes[row, column]
            ax.set_axis_off()
            if column < len(strip):
                _draw(ax, *strip[column], colours)
    figure.savefig(path, dpi=110)


def _strip(outcome: Outcome) -> list[tuple[str, np.ndarray]]:
    cells = []
    for n, pair in enumerate(outcome.episode.inputs.demos, start=1):
        cells += [(f"in {n}", pair.input), (f"out {n}", pair.output)]
    for caption, grid, verdict in panels(outcome):
        cells.append((f"{caption.replace(', ', chr(10))}{chr(10) * bool(verdict)}{verdict}", grid))
    name, grid = cells[0]
    return [(f"{outcome.task_id}\n{name}", grid), *cells[1:]]


def _draw(ax: Any, caption: str, grid: np.ndarray, colours: Any) -> None:
    ax.set_title(caption, fontsize=7)
    height, width = grid.shape
    ax.imshow(grid, cmap=colours, vmin=0, vmax=9, interpolation="nearest", aspect="equal")
    ax.hlines(np.arange(-0.5, height), -0.5, width - 0.5, colors=LINES, linewidth=0.4)
    ax.vlines(np.arange(-0.5, width), -0.5, height - 0.5, colors=LINES, linewidth=0.4)
