"""Entropy over a run: fresh rollouts, and the changes summed from the first checkpoint on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entropy_experiments.report.figures.style import (
    ACCENT,
    DESTROY,
    LINE,
    MUTED,
    legend_above,
    panels,
)
from entropy_experiments.report.sections import Steps
from entropy_experiments.report.trajectory import last_step, summed_changes
from entropy_experiments.results import Change

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
