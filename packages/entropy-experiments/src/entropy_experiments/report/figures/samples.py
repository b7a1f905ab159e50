"""Single update rollouts over the step size: what was measured along v_i, and the straight line.

A panel per rollout: the measured change with its error bars, what the baseline's company changes
about it, and the first-order line. `report.linearity` has the same in numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from entropy_experiments.artifacts import write_changed
from entropy_experiments.report.figures.style import (
    ACCENT,
    INK,
    MUTED,
    image,
    in_units,
    panels,
    paper_style,
    zero_line,
)
from entropy_experiments.report.linearity import Deltas, evaluations, measured_deltas
from entropy_experiments.study_files import Files, files_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = 6
ACROSS = 3
Pair = tuple[Deltas, Deltas | None]


def plot_grad_delta_samples(
    run_dir: str | Path,
    rollouts: Sequence[int] | None = None,
    path: str | Path | None = None,
    *,
    evaluation: str | None = None,
    reference_eta: float | None = None,
) -> Path:
    """Draw the chosen update rollouts of a study's folder; returns the file.

    Without `rollouts`: the six with the largest measured change, as the study itself draws them.
    Without `path`: plots/<evaluation>_grad_delta_samples.png below the folder, with the numbers of
    chosen rollouts in its name. Without `evaluation`: the first batch.
    """
    run = files_of(run_dir)
    found = evaluations(run)
    evaluation = evaluation or found[0]
    if evaluation not in found:
        raise ValueError(f"No evaluation batch {evaluation!r} in {run.folder}; it has {found}.")
    chosen = samples(run, evaluation, rollouts, reference_eta)
    path = run.folder / samples_name(evaluation, rollouts) if path is None else Path(path)
    with paper_style():
        data = image(samples_figure(chosen), path.suffix)
    write_changed(path, data)  # the study's own drawing stays
    return path


def samples_name(evaluation: str, rollouts: Sequence[int] | None = None) -> str:
    end = "" if rollouts is None else "_" + "_".join(map(str, rollouts))
    return f"plots/{evaluation}_grad_delta_samples{end}.png"


def samples(
    run: Files,
    evaluation: str,
    rollouts: Sequence[int] | None = None,
    reference_eta: float | None = None,
) -> list[Pair]:
    """Each chosen rollout, alone and beside the baseline."""
    alone, company = (
        {
            deltas.rollout: deltas
            for deltas in measured_deltas(run, evaluation, flavour, reference_eta=reference_eta)
        }
        for flavour in ("grad", "baseline_plus_grad")
    )
    return [(alone[i], company.get(i)) for i in _chosen(alone, rollouts, evaluation)]


def _chosen(
    measured: dict[int, Deltas], rollouts: Sequence[int] | None, evaluation: str
) -> list[int]:
    if not measured:
        raise ValueError(f"No rollout of {evaluation} was measured: there is nothing to draw.")
    if rollouts is None:
        by_size = sorted(measured, key=lambda i: -abs(measured[i].changes[-1]))
        return sorted(by_size[:PANELS])
    unmeasured = [i for i in rollouts if i not in measured]
    if unmeasured or not rollouts:
        raise ValueError(
            f"Rollouts {unmeasured} of {evaluation} were not measured; expected one or more of "
            f"{sorted(measured)}."
        )
    return list(rollouts)


def samples_figure(pairs: Sequence[Pair]) -> Figure:
    figure, grid = panels(
        len(pairs), columns=1 if len(pairs) == 1 else 2, height=2.0, across=ACROSS
    )
    every = [abs(change) for one, _ in pairs for change in one.changes]
    for place, (axes, (alone, company)) in enumerate(zip(grid, pairs)):
        zero_line(axes)
        axes.errorbar(
            alone.etas,
            alone.changes,
            yerr=alone.stderrs,
            fmt="o",
            color=INK,
            elinewidth=0.9,
            label="measured, standard error",
        )
        if company is not None:
            style = {"color": MUTED, "markersize": 5, "label": "beside the baseline"}
            axes.plot(company.etas, company.changes, "x", **style)
        if alone.first_order is not None:
            ends = [0.0, max(alone.etas)]
            line = [alone.first_order * eta for eta in ends]
            axes.plot(ends, line, "--", color=ACCENT, label="first order")
        axes.set_title(f"update rollout {alone.rollout}")
        left, below = place % ACROSS == 0, place + ACROSS >= len(pairs)
        in_units(axes.xaxis, [max(alone.etas)], "step size η" if below else "", "")
        in_units(axes.yaxis, every, "entropy change" if left else "", "nats" if left else "")
        if not left:
            axes.set_ylabel("")
        if not below:
            axes.set_xlabel("")
    handles, labels = grid[0].get_legend_handles_labels()
    columns = 3 if len(pairs) > 1 else 1
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)
    return figure
