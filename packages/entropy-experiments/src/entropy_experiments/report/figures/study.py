"""What a study draws by itself, into plots/; from its own files, without torch."""

from __future__ import annotations

from entropy_experiments.report.figures.ledger import ledger_figure
from entropy_experiments.report.figures.samples import samples, samples_figure, samples_name
from entropy_experiments.report.figures.style import image, paper_style
from entropy_experiments.report.html.books import study_books
from entropy_experiments.report.linearity import measured_deltas
from entropy_experiments.results import InfluenceResult
from entropy_experiments.study_files import Files


def study_plots(run: Files, summary: InfluenceResult) -> dict[str, bytes]:
    """By file name, for each evaluation batch: its ledger, and single rollouts if measured."""
    out: dict[str, bytes] = {}
    with paper_style():
        for told in summary["evaluations"]:
            name = told["name"]
            unit = (told.get("estimand") or {}).get("unit", "token")
            books = study_books(told["ledger"], unit)
            out[f"plots/{name}_ledger.png"] = image(ledger_figure(books, columns=2))
            if measured_deltas(run, name, "grad"):
                out[samples_name(name)] = image(samples_figure(samples(run, name)))
    return out
