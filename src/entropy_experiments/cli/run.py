"""`entropy-probe run`: from a checkpoint to a verdict."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from entropy_experiments.cli.endings import ending
from entropy_experiments.cli.options import (
    AsJson,
    Checkpoint,
    ConfigFile,
    Debug,
    Overrides,
    Quiet,
    tell_notes,
)

if TYPE_CHECKING:
    from entropy_experiments.config import Config

EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe run\n"
    "  entropy-probe run --checkpoint runs/checkpoint-60 --out results/step_60\n"
    "  entropy-probe run --config my.yaml --set batch_config.B_E=256 --set update.lr=8e-7\n"
    "  entropy-probe run --config test_deltaH1 --json > results.json"
)


def run(
    config: ConfigFile = None,
    checkpoint: Checkpoint = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write logs, rollouts and results.json below this folder."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Predict what an update does to entropy, measure it, and say what to believe."""
    found: Config | None = None
    with ending(debug=debug, interrupted=lambda: _interrupted(found)):
        found = configured(config, checkpoint, out, overrides or [])
        tell_notes(found, quiet=quiet)

        from entropy_experiments.offline_entropy_probe import OfflineEntropyProbe

        # With --json, stdout carries JSON and nothing else, whatever a library prints.
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            results = OfflineEntropyProbe(found, quiet=quiet).run_mixed_probe()
        if as_json:
            typer.echo(json.dumps(results, indent=2, allow_nan=False))
        else:
            typer.echo("\n".join(results["verdict"]))


def configured(
    config: str | None, checkpoint: Path | None, out: Path | None, overrides: list[str]
) -> Config:
    """The file, then the options, then --set: the most explicit wins."""
    from entropy_experiments.config import load_config

    found = load_config(config)
    if out is not None:
        found = found.under(out)
    if checkpoint is not None:
        changes = {"checkpoint.checkpoint_path": str(checkpoint)}
        found = found.replaced(changes, where="--checkpoint")
    return found.with_overrides(overrides)


def _interrupted(config: Config | None) -> str:
    if config is None:
        return "Interrupted before anything was computed."
    return (
        f"Interrupted. Finished units of rollouts are kept in {config.rollout_folder}; the "
        "same command continues from them."
    )
