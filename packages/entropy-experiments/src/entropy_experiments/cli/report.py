"""`entropy-probe report`: what the files of finished runs say, in words, figures and HTML."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from entropy_experiments.artifacts import try_outputs
from entropy_experiments.cli.job import ending
from entropy_experiments.cli.options import AsJson, Debug, Quiet, print_results
from entropy_experiments.results.run_ledger import is_run_ledger

if TYPE_CHECKING:
    from entropy_experiments.report.compare import Comparison
    from entropy_experiments.report.linearity import LineFit

EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe report results/entropy_influence/run   in words, and run/report.html\n"
    "  entropy-probe report logs/2026-11-16/entropy_probe_14-30-25_step_60.json.gz\n"
    "  entropy-probe report build/demo/influence --trajectory build/demo/trajectory.json\n"
    "  entropy-probe report RUN --figures figures           PDF and PNG, for papers\n"
    "  entropy-probe report results/run_ledger/run          who spent a run's entropy\n"
    "  entropy-probe report runs/grpo --follow              while it trains, drawn again\n"
    "  entropy-probe report RUN1 RUN2 RUN3 --html three.html   side by side\n"
    "  entropy-probe report results/entropy_influence/run --linearity\n"
    "  entropy-probe report RUN --samples --rollout 3 --rollout 7 --out two.png"
)
UNTOLD = ("texts", "covariance", "matrix", "environment")
"""Sections of a gathered run that --json leaves out: they are files of the run already."""


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folder of a study, a probe, measurements, a run's ledger or a probed training, "
            "log or trajectory.json; several: side by side.",
        ),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Where the HTML report goes.")
    ] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Print the text alone.")] = False,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="DIR", help="Write figures for papers, PDF and PNG."),
    ] = None,
    columns: Annotated[
        int, typer.Option("--columns", help="Width of figures: 1 or 2 columns of a paper.")
    ] = 1,
    trajectory: Annotated[
        Path | None,
        typer.Option("--trajectory", metavar="FILE", help="The run's trajectory.json beside it."),
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option("--evaluation", metavar="NAME", help="Evaluation batch that is drawn."),
    ] = None,
    linearity: Annotated[
        bool, typer.Option("--linearity", help="Is each rollout's change a line in the step size?")
    ] = False,
    samples: Annotated[
        bool, typer.Option("--samples", help="Draw single rollouts' changes over the step size.")
    ] = False,
    rollouts: Annotated[
        list[int] | None,
        typer.Option("--rollout", help="Update rollout to draw; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the drawing goes (--samples).")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Draw a training's report again while it goes on."),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Read runs' files again: in words, as one HTML file, as figures; several side by side."""
    with ending(debug=debug, interrupted=lambda: "No longer following; the last report stays."):
        try_outputs((figures,), (html, out))
        if follow:
            unusable = {"--no-html": no_html, "--figures": figures, "--trajectory": trajectory}
            unusable |= {"--evaluation": evaluation, "--linearity": linearity, "--samples": samples}
            unusable |= {"--json": as_json, "a second run": len(runs) > 1}
            _follow(runs[0], html, unusable, quiet=quiet)
            return
        if (rollouts or out is not None) and not samples:
            raise ValueError("--rollout and --out are about the drawing: add --samples.")
        if no_html and (html or ((trajectory or evaluation) and figures is None)):
            raise ValueError(
                "--no-html together with --html, --trajectory or --evaluation, which are about "
                "the HTML report. Leave one out."
            )
        if len(runs) > 1:
            unusable = {
                "--figures": figures,
                "--trajectory": trajectory,
                "--evaluation": evaluation,
            }
            unusable |= {"--linearity": linearity, "--samples": samples}
            _side_by_side(runs, html, unusable, as_json=as_json)
            return
        (run,) = runs
        if is_run_ledger(run):
            unusable = {"linearity": linearity, "samples": samples}
            unusable |= {"trajectory": trajectory, "evaluation": evaluation}
            page = (html, no_html)
            _run_ledger(run, page, figures, columns, unusable, as_json=as_json, quiet=quiet)
            return
        results: dict[str, Any] = {"run": str(run)}
        lines: list[str] = []
        if linearity:
            from entropy_experiments.report.linearity import (
                analyze_grad_linearity,
                linearity_table,
            )

            fits = analyze_grad_linearity(run, show=None)
            results["linearity"] = [_fit(fit) for fit in fits]
            lines += linearity_table(fits)
        if samples:
            results["samples"] = str(_drawn(run, rollouts, out))
            lines.append(results["samples"])
        words_alone = linearity or samples
        if not words_alone and not as_json:
            lines += _in_words(run)
        if as_json and not words_alone:
            results |= _gathered(run, trajectory, evaluation)
        asked_html = html is not None or trajectory or evaluation
        if (asked_html and not no_html) or not (no_html or words_alone):
            page = _write_html(run, html, trajectory, evaluation, quiet=quiet)
            if page is not None:
                results["html"] = str(page)
                lines.append(f"Report: {page}")
        if figures is not None:
            from entropy_experiments.report.figures.write import write_figures

            options = {"trajectory": trajectory, "evaluation": evaluation, "columns": columns}
            results["figures"] = [str(path) for path in write_figures(run, figures, **options)]
            lines.append(f"Figures: {len(results['figures'])} files in {figures}")
        print_results(results, lambda: lines, as_json=as_json)


def _run_ledger(
    run: Path,
    page: tuple[Path | None, bool],
    figures: Path | None,
    columns: int,
    options: dict[str, Any],
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    from entropy_experiments.report.html.page import refuse_for_ledger
    from entropy_experiments.report.html.run_ledger import run_ledger_lines
    from entropy_experiments.report.run_ledger import run_ledger_view

    refuse_for_ledger(run, **options)
    view = run_ledger_view(run)
    results: dict[str, Any] = {"run": str(run), "summary": view["summary"]}
    results |= {"groupings": view["groupings"], "bins": view["bins"]}
    results |= {"prompts": view["prompts"], "texts": view["texts"]}
    lines = run_ledger_lines(view)
    html, no_html = page
    if not no_html and (written := _write_html(run, html, None, None, quiet=quiet)) is not None:
        results["html"] = str(written)
        lines.append(f"Report: {written}")
    if figures is not None:
        from entropy_experiments.report.figures.write import write_figures

        results["figures"] = [str(path) for path in write_figures(run, figures, columns=columns)]
        lines.append(f"Figures: {len(results['figures'])} files in {figures}")
    print_results(results, lambda: lines, as_json=as_json)


def _follow(run: Path, html: Path | None, options: dict[str, Any], *, quiet: bool) -> None:
    wrong = [name for name, value in options.items() if value]
    if wrong:
        raise ValueError(
            f"--follow together with {', '.join(wrong)}: it redraws the HTML report of one probed "
            "training, and nothing else. Leave one out."
        )
    from entropy_experiments.report.html.page import checked, default_path, write_report
    from entropy_experiments.report.training import EVERY, follow

    checked()
    page = default_path(run) if html is None else html
    say = (lambda line: None) if quiet else (lambda line: typer.echo(line, err=True))

    def draw(going_on: bool) -> None:
        first = not page.exists()
        write_report(run, page, refresh=round(EVERY) if going_on else None)
        if first:
            say(f"Report: {page} (open it in a browser: it loads itself again)")

    times = follow(run, draw, say=say)
    drawn = f"Report: {page} (drawn {times} times)"
    typer.echo(f"Training has ended. {drawn if times else 'Fewer than two steps were probed.'}")


def _fit(fit: LineFit) -> dict[str, Any]:
    bend = fit.bend if math.isfinite(fit.bend) else None  # of a line without a slope
    return {**asdict(fit), "bend": bend, "flags": list(fit.flags)}


def _gathered(run: Path, trajectory: Path | None, evaluation: str | None) -> dict[str, Any]:
    from entropy_experiments.report.html.data import gather

    data = gather(run, trajectory=trajectory, evaluation=evaluation)
    return {name: value for name, value in data.items() if name not in UNTOLD}


def _side_by_side(
    runs: list[Path], html: Path | None, options: dict[str, Any], *, as_json: bool
) -> None:
    wrong = [name for name, value in options.items() if value]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} with {len(runs)} runs: these are about one run. Leave them out, "
            "or name one run."
        )
    from entropy_experiments.report.compare import compare

    comparison = compare(runs)
    if html is not None:
        from entropy_experiments.report.html.compare import write_comparison

        comparison["html"] = str(write_comparison(runs, html))
    if as_json or not sys.stdout.isatty():
        from entropy_experiments.report.compare import table_lines

        print_results(comparison, lambda: list(table_lines(comparison))[1:], as_json=as_json)
    else:
        _on_the_screen(comparison)
    if html is not None and not as_json:
        typer.echo(f"Report: {html}")


def _on_the_screen(comparison: Comparison) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from entropy_experiments.report.compare import tables

    console = Console()
    for one in tables(comparison):
        console.print(Text(one.title, style="bold"), Text(one.about, style="dim"), sep="\n")
        drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for at, name in enumerate(one.head):
            # Folded where the screen is narrow: a number cut short would be another number.
            drawn.add_column(Text(name), justify="left" if at == 0 else "right", overflow="fold")
        for row in one.rows:
            drawn.add_row(*(Text(cell) for cell in row))
        console.print(drawn)


def _in_words(run: Path) -> list[str]:
    from entropy_experiments.report.html.data import as_written, found_at, gather

    kind, path = found_at(run)
    with as_written(path):
        if kind in ("trajectory", "training"):
            verdict = gather(path)["verdict"]
            return [verdict["sentence"], *verdict["points"], *verdict["doubts"]]
        if kind == "measure":
            from entropy_experiments.report.measurements import measurement_report
            from entropy_experiments.results import read_measurements

            return measurement_report(read_measurements(path))
        if kind == "probe":
            from entropy_experiments.report.html.from_log import log_report

            return log_report(path)
        from entropy_experiments.report.influence_tables import influence_report
        from entropy_experiments.study_files import open_run

        return influence_report(open_run(path).summary())


def _write_html(
    run: Path,
    html: Path | None,
    trajectory: Path | None,
    evaluation: str | None,
    *,
    quiet: bool,
) -> Path | None:
    from entropy_experiments.report.html.page import missing, write_report

    lacking = missing()
    if lacking is not None and html is None:
        if not quiet:
            typer.echo(f"No HTML report: {lacking}", err=True)  # the words were what was asked for
        return None
    return write_report(run, html, trajectory=trajectory, evaluation=evaluation)


def _drawn(run: Path, rollouts: list[int] | None, out: Path | None) -> Path:
    from entropy_experiments.report.figures.style import INSTALL, can_draw

    if not can_draw():
        raise ValueError(
            f"Drawing needs matplotlib, which is not installed: {INSTALL}. --linearity has the "
            "same in numbers."
        )
    from entropy_experiments.report.figures.samples import plot_grad_delta_samples

    return plot_grad_delta_samples(run, rollouts, out)
