"""One style for every figure: fonts, sizes, colours, and the same bytes for the same numbers.

    with paper_style():
        figure, (axes,) = panels(1, columns=1, height=2.4)
        ...
        image(figure, ".pdf")

Widths are those of a column and of a page of a two-column paper, in inches; text has the size that
it has in print. Orange lowers the entropy and blue raises it, as in the HTML report: a pair that
eyes without red or green tell apart. No pyplot: a figure of its own leaves the caller's backend,
style and open figures alone. Files carry no date and no version of what wrote them; bytes depend
on the versions of matplotlib and its fonts, on nothing else.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from entropy_experiments.report.words import MINUS, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INSTALL = "pip install 'entropy-experiments[plot]'"
NEEDED = f"figures need matplotlib, not installed here: {INSTALL}"
WIDTH = {1: 3.35, 2: 6.9}
"""Inches of one and of two columns."""
DPI = 300
INK, MUTED, LINE, UNSURE = "#1c2024", "#6a717a", "#e4e5e2", "#b4b8bd"
ACCENT, DESTROY, CREATE = "#1f6f9f", "#d9791f", "#3f8fc9"
WASH, FLOOR = "#efefe9", "#e9d9cf"
DIVERGING = (DESTROY, "#ffffff", CREATE)
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.color": INK,
    "text.parse_math": False,  # a what-if's name may hold a dollar
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.borderaxespad": 0.2,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "pdf.fonttype": 42,  # letters stay letters
    "svg.fonttype": "none",
    "svg.hashsalt": "entropy-experiments",
}


def can_draw() -> bool:
    """Whether matplotlib is installed; it is not imported."""
    return find_spec("matplotlib") is not None


@contextmanager
def paper_style() -> Iterator[None]:
    """The style above on matplotlib's own defaults, whatever the user's matplotlibrc says."""
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE]):
        yield


def panels(
    count: int, *, columns: int, height: float, across: int = 1
) -> tuple[Figure, list[Axes]]:
    """So many panels, `across` in a row, on a figure as wide as `columns` of a paper."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if columns not in WIDTH:
        raise ValueError(f"columns is {columns}; expected one of {sorted(WIDTH)}.")
    across = max(1, min(across, count))
    rows = -(-count // across)
    figure = Figure(figsize=(WIDTH[columns], height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, across, squeeze=False).flat)
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def image(figure: Figure, suffix: str = ".png") -> bytes:
    """The file's contents, in the format of this suffix."""
    buffer, kind = io.BytesIO(), suffix.removeprefix(".").lower() or "png"
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise ValueError(
            f"Cannot draw a {suffix} file; expected one of {', '.join(sorted(known))}."
        )
    # Otherwise a file names the version that wrote it, and when.
    unsaid = {
        "png": ("Software",),
        "pdf": ("Creator", "Producer", "CreationDate"),
        "svg": ("Creator", "Date"),
        "ps": ("Creator",),
        "eps": ("Creator",),
    }
    figure.savefig(buffer, format=kind, dpi=DPI, metadata=dict.fromkeys(unsaid.get(kind, ())))
    return buffer.getvalue()


def in_units(axis: Axis, values: Iterable[float | None], label: str, unit: str) -> None:
    """Ticks in a power of ten that the label tells: `entropy change, 10⁻³ nats`."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    largest = max((abs(value) for value in values if value is not None), default=0.0)
    power = math.floor(math.log10(largest)) if largest else 0
    power = 0 if -2 < power < 4 else power
    axis.set_major_formatter(FuncFormatter(lambda x, _: _tick(x / 10.0**power)))
    axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    separate = ", " if label else ""
    axis.set_label_text(f"{label}{separate}{unit_of(power)}{unit}".rstrip())


def _tick(value: float) -> str:
    return f"{round(value, 6):g}".replace("-", MINUS)


def whiskers(
    values: Sequence[float], intervals: Sequence[Sequence[float] | None]
) -> list[list[float]]:
    """Lengths below and above, as errorbar wants them; none where there is no interval."""
    ends = [bar or (value, value) for value, bar in zip(values, intervals)]
    low = [max(0.0, value - end[0]) for value, end in zip(values, ends)]
    return [low, [max(0.0, end[1] - value) for value, end in zip(values, ends)]]


def zero_line(axes: Axes, *, upright: bool = False) -> None:
    draw = axes.axvline if upright else axes.axhline
    draw(0, color=UNSURE, linewidth=0.8, zorder=0.5)


def legend_above(axes: Axes, entries: int) -> None:
    """Over the panel, so that it hides nothing."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=entries,
        columnspacing=1.2,
        handletextpad=0.5,
    )
