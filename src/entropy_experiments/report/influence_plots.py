"""A quick look at single update directions: measured change against step size.

One panel per update rollout: what was measured along v_i, with its error bars, what the baseline's
company changes about it, and the first-order line. `linearity` has the same in numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from entropy_experiments.report.linearity import Deltas, evaluations, measured_deltas
from entropy_experiments.report.run_files import files_of

PANELS = 6
COLUMNS = 3


def plot_grad_delta_samples(
    run_dir: str | Path,
    rollouts: Sequence[int] | None = None,
    path: str | Path | None = None,
    *,
    evaluation: str | None = None,
    reference_eta: float | None = None,
) -> Path:
    """Draw the chosen update rollouts of a study's folder; returns the file.

    Without `rollouts`: the six with the largest measured change. Without `path`:
    plots/grad_delta_samples.png below the folder. Without `evaluation`: the first batch.
    """
    run = files_of(run_dir)
    found = evaluations(run)
    evaluation = evaluation or found[0]
    if evaluation not in found:
        raise ValueError(f"No evaluation batch {evaluation!r} in {run.folder}; it has {found}.")
    alone = {
        deltas.rollout: deltas
        for deltas in measured_deltas(run, evaluation, "grad", reference_eta=reference_eta)
    }
    with_baseline = {
        deltas.rollout: deltas
        for deltas in measured_deltas(
            run, evaluation, "baseline_plus_grad", reference_eta=reference_eta
        )
    }
    chosen = _chosen(alone, rollouts, evaluation)
    path = Path(path) if path is not None else run.folder / "plots" / "grad_delta_samples.png"
    _draw([(alone[i], with_baseline.get(i)) for i in chosen], path)
    return path


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


def _draw(pairs: list[tuple[Deltas, Deltas | None]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(COLUMNS, len(pairs))
    rows = -(-len(pairs) // columns)
    size = (3.2 * columns, 2.6 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes, (alone, company) in zip(grid.flat, pairs):
        axes.axhline(0, color="0.8", linewidth=0.8)
        axes.errorbar(
            alone.etas, alone.changes, yerr=alone.stderrs, fmt="o", color="C3", label="measured"
        )
        if company is not None:
            axes.plot(company.etas, company.changes, "x", color="0.4", label="beside the baseline")
        if alone.first_order is not None:
            ends = [0.0, max(alone.etas)]
            line = [alone.first_order * eta for eta in ends]
            axes.plot(ends, line, "--", color="C0", label="first order")
        axes.set_title(f"update rollout {alone.rollout}", fontsize=9)
        axes.ticklabel_format(axis="both", scilimits=(-2, 3))
    for axes in list(grid.flat)[len(pairs) :]:
        axes.set_axis_off()
    figure.supxlabel("step size eta", fontsize=9)
    figure.supylabel("entropy change, nats (bars: standard error)", fontsize=9)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
