"""`entropy-probe report`: what the files of a finished influence study say, without any model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from entropy_experiments.cli.config import Debug
from entropy_experiments.cli.endings import ending

EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe report results/entropy_influence/run            the study in words\n"
    "  entropy-probe report results/entropy_influence/run --linearity\n"
    "  entropy-probe report RUN --samples --rollout 3 --rollout 7 --out two.png"
)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of an influence study.")],
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
    debug: Debug = False,
) -> None:
    """Read a study's files again: its summary, or the fits and drawings over step sizes."""
    with ending(debug=debug):
        if (rollouts or out is not None) and not samples:
            raise ValueError("--rollout and --out are about the drawing: add --samples.")
        if linearity:
            from entropy_experiments.report.linearity import analyze_grad_linearity

            analyze_grad_linearity(run, show=typer.echo)
        if samples:
            typer.echo(_drawn(run, rollouts, out))
        if not linearity and not samples:
            from entropy_experiments.report.influence_tables import influence_report
            from entropy_experiments.report.run_files import open_run

            typer.echo("\n".join(influence_report(open_run(run).summary())))


def _drawn(run: Path, rollouts: list[int] | None, out: Path | None) -> Path:
    if find_spec("matplotlib") is None:
        raise ValueError(
            "Drawing needs matplotlib, which is not installed: pip install "
            "'entropy-experiments[plot]'. --linearity has the same in numbers."
        )
    from entropy_experiments.report.influence_plots import plot_grad_delta_samples

    return plot_grad_delta_samples(run, rollouts, out)
