"""Every figure of a run, as files: the same gathered numbers as the HTML report, so the same.

write_figures(RUN, DIR)        DIR/curve.pdf, DIR/curve.png, DIR/ledger.pdf, ...; of a run's ledger
                               DIR/account_class.pdf, DIR/rates_class.pdf, ...
study_plots(files, summary)    plots/<evaluation>_ledger.png, ..._grad_delta_samples.png
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from entropy_experiments.artifacts import write_whole
from entropy_experiments.report.figures.charts import (
    cells_figure,
    curve_figure,
    ledger_figure,
    matrix_figure,
    points_figure,
    rollouts_figure,
    trajectory_figure,
    what_if_figure,
)
from entropy_experiments.report.figures.run_ledger import run_ledger_figures
from entropy_experiments.report.figures.samples import samples, samples_figure, samples_name
from entropy_experiments.report.figures.style import NEEDED, can_draw, image, paper_style
from entropy_experiments.report.html.books import study_books
from entropy_experiments.report.html.data import gather
from entropy_experiments.report.html.page import refuse_for_ledger
from entropy_experiments.report.linearity import measured_deltas
from entropy_experiments.report.run_ledger import run_ledger_view
from entropy_experiments.report.sections import ReportData
from entropy_experiments.results import InfluenceResult
from entropy_experiments.results.run_ledger import is_run_ledger
from entropy_experiments.study_files import Files

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SUFFIXES = (".pdf", ".png")


def write_figures(
    run: str | Path,
    folder: str | Path,
    *,
    trajectory: str | Path | None = None,
    evaluation: str | None = None,
    columns: int = 1,
    suffixes: Sequence[str] = SUFFIXES,
) -> list[Path]:
    """The files written; `columns` of a two-column paper, 1 or 2, are how wide figures are."""
    if not can_draw():
        raise ValueError(NEEDED)
    folder, out = Path(folder), []
    with paper_style():
        if is_run_ledger(run):
            refuse_for_ledger(Path(run), trajectory=trajectory, evaluation=evaluation)
            made = run_ledger_figures(run_ledger_view(run), columns=columns)
        else:
            data = gather(run, trajectory=trajectory, evaluation=evaluation)
            made = figures_of(data, columns=columns)
            if not made:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in data["absent"].items())
                raise ValueError(f"{run} has nothing to draw ({reasons}).")
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in made.items():
            for suffix in suffixes:
                path = folder / f"{name}{suffix}"
                write_whole(path, image(figure, suffix))
                out.append(path)
    return out


def figures_of(data: ReportData, *, columns: int = 1) -> dict[str, Figure]:
    """By name; a section that the run has no data for has none. Within `paper_style`."""
    out: dict[str, Figure | None] = {}
    if run := data.get("trajectory"):
        out["trajectory"] = trajectory_figure(run, columns=columns)
    if over_eta := data.get("curve"):
        out["curve"] = curve_figure(over_eta, data["unit"], columns=columns)
    if ledger := data.get("ledger"):
        out["ledger"] = ledger_figure(ledger["books"], columns=columns)
    if by := data.get("rollouts"):
        out["rollouts"] = rollouts_figure(by, columns=columns)
    if pushed := data.get("covariance"):
        out["points"] = points_figure(pushed, columns=columns)
        out["cells"] = cells_figure(pushed["cells"], columns=columns)
    if questions := data.get("what_if"):
        out["what_if"] = what_if_figure(questions, columns=columns)
    if pairs := data.get("matrix"):
        out["matrix"] = matrix_figure(pairs, columns=columns)
    return {name: figure for name, figure in out.items() if figure is not None}


def study_plots(run: Files, summary: InfluenceResult) -> dict[str, bytes]:
    """By file name, for each evaluation batch: its ledger, and single rollouts if measured."""
    out: dict[str, bytes] = {}
    with paper_style():
        for told in summary["evaluations"]:
            name = told["name"]
            unit = (told.get("estimand") or {}).get("unit", "token")
            books = study_books(told, unit)
            out[f"plots/{name}_ledger.png"] = image(ledger_figure(books, columns=2))
            if measured_deltas(run, name, "grad"):
                out[samples_name(name)] = image(samples_figure(samples(run, name)))
    return out
