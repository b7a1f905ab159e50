"""`entropy-probe measure`: measured, linear and quadratic changes over fresh batches."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from entropy_experiments.cli.config import Debug, Overrides
from entropy_experiments.cli.endings import ending
from entropy_experiments.cli.run import configured

if TYPE_CHECKING:
    from entropy_experiments.config import Config

EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe measure\n"
    "  entropy-probe measure --set experiment.repeats=5\n"
    "  entropy-probe measure --set experiment.compute_linquad=true --out results/bend\n"
    '  entropy-probe measure --set "estimator.eta_list=[1e-3, 4e-3]" --out results/sweep\n'
    "  entropy-probe measure --checkpoint runs/checkpoint-60 --json > sweep.json"
)


def measure(
    config: Annotated[
        str | None,
        typer.Option("--config", help="YAML file or template. Without it: the quick start."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="Folder. Without it: the policy in the package."),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write rollouts and results.json below this folder."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on the screen.")] = False,
    debug: Debug = False,
) -> None:
    """Measure an update's entropy change at several step sizes, over fresh batches."""
    found: Config | None = None
    with ending(debug=debug, interrupted=lambda: _interrupted(found)):
        found = configured(config, checkpoint, out, overrides or [])
        if not quiet:
            for note in found.notes:
                typer.echo(f"note: {note}", err=True)

        from entropy_experiments.entropy_experiment_runner import (
            EntropyMeasurements,
            measurement_report,
        )

        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            results = EntropyMeasurements(found, quiet=quiet).run_experiments()
        if as_json:
            typer.echo(json.dumps(results, indent=2, allow_nan=False))
        else:
            typer.echo("\n".join(measurement_report(results)))


def _interrupted(config: Config | None) -> str:
    if config is None:
        return "Interrupted before anything was computed."
    return (
        f"Interrupted. Finished repeats and rollouts are kept in {config.rollout_folder}; the same "
        "command continues from them."
    )
