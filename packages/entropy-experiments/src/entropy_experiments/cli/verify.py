"""`entropy-probe verify`: a verl checkpoint as it is read here against verl's own merger."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from entropy_experiments.cli.job import FINDINGS, ending
from entropy_experiments.cli.options import AsJson, Debug, Quiet

EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe verify runs/grpo/global_step_340\n"
    "  entropy-probe verify runs/grpo/global_step_340 --merged merged_340 --json"
)


def verify(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint of verl or SkyRL: global_step_N, or its actor.")
    ],
    merged: Annotated[
        Path | None,
        typer.Option(
            "--merged",
            help="What `python -m verl.model_merger merge` wrote. Default: run it now; it loads "
            "the files by unsafe pickle, so trust them.",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Check the model put together from verl's rank files against verl's own merger."""
    with ending(debug=debug):
        from entropy_experiments.checkpoints.verl_merger import compare_with_merger

        comparison = compare_with_merger(checkpoint, merged=merged)
        if as_json:
            typer.echo(json.dumps({**asdict(comparison), "same": comparison.same}))
        elif not quiet:
            typer.echo(str(comparison))
    if not comparison.same:
        raise typer.Exit(FINDINGS)
