"""`entropy-probe influence`: which tokens, rollouts and terms moved the entropy; and what if."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    "  entropy-probe influence\n"
    "  entropy-probe influence --checkpoint runs/checkpoint-60 --out results/step_60\n"
    "  entropy-probe influence --what-if drop=negative --what-if clip_high=0.28 --confirm\n"
    "  entropy-probe influence --from results/step_60 --what-if 'drop=p<0.1&A<0'\n"
    "  entropy-probe influence --entropy-budget -0.02 --json > influence.json"
)


def influence(
    config: ConfigFile = None,
    checkpoint: Checkpoint = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory. Without it: results/entropy_influence/..."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="EXPR", help="Another step; may be repeated."),
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Make each what-if's step and measure it.")
    ] = False,
    entropy_budget: Annotated[
        float | None,
        typer.Option("--entropy-budget", metavar="NATS", help="Learning rate that changes H so."),
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option("--from", help="What-ifs from this run directory, without a model."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another study in the run directory.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Say which tokens, rollouts and optimizer terms moved the entropy, and what if."""
    found: Config | None = None
    with ending(debug=debug, interrupted=lambda: _interrupted(found)):
        if saved is not None:
            given = {"--config": config, "--checkpoint": checkpoint, "--set": overrides}
            given |= {"--out": out, "--confirm": confirm, "--overwrite": overwrite}
            _from_saved(saved, what_if or [], entropy_budget, given, as_json=as_json)
            return
        found = _configured(config, checkpoint, out, what_if, confirm, entropy_budget, overrides)
        if confirm and not found.influence.what_if:
            raise ValueError(
                "--confirm has nothing to confirm; expected a step to make and measure. Add "
                "--what-if, such as --what-if drop=negative."
            )
        tell_notes(found, quiet=quiet)

        from entropy_experiments.entropy_influence import EntropyInfluenceRunner

        # With --json, stdout carries JSON and nothing else, whatever a library prints.
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            summary = EntropyInfluenceRunner(found, quiet=quiet).run(overwrite=overwrite)
        if as_json:
            typer.echo(json.dumps(summary, indent=2, allow_nan=False))
            return

        from entropy_experiments.report.influence_tables import influence_report

        typer.echo("\n".join(influence_report(summary)))
        typer.echo(f"Files: {summary['run_directory']}")


def _from_saved(
    folder: Path,
    what_if: list[str],
    entropy_budget: float | None,
    given: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} together with --from: a saved table is read without a model. "
            "Leave them out, or run the study again without --from."
        )
    if not what_if and entropy_budget is None:
        raise ValueError("--from has no question; expected --what-if or --entropy-budget.")

    from entropy_experiments.entropy_influence import what_if_from

    found = what_if_from(folder, what_if, entropy_budget=entropy_budget)
    if as_json:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
        return
    for evaluation in found["evaluations"]:
        if len(found["evaluations"]) > 1:
            typer.echo(f"{evaluation['name']}:")
        for answer in evaluation["what_if"]:
            typer.echo(answer["text"])
        if evaluation["entropy_budget"] is not None:
            typer.echo(evaluation["entropy_budget"]["text"])


def _configured(
    config: str | None,
    checkpoint: Path | None,
    out: Path | None,
    what_if: list[str] | None,
    confirm: bool,
    entropy_budget: float | None,
    overrides: list[str] | None,
) -> Config:
    """The file, then the options, then --set: the most explicit wins."""
    from entropy_experiments.config import load_config

    changes: dict[str, Any] = {}
    if out is not None:
        changes["influence.run_directory"] = str(out)
        changes["rollouts.save"] = str(out / "rollouts")
    if checkpoint is not None:
        changes["checkpoint.checkpoint_path"] = str(checkpoint)
    if what_if:
        changes["influence.what_if"] = what_if
    if confirm:
        changes["influence.confirm"] = True
    if entropy_budget is not None:
        changes["influence.entropy_budget"] = entropy_budget
    found = load_config(config).replaced(changes, where="the command line")
    return found.with_overrides(overrides or [])


def _interrupted(config: Config | None) -> str:
    if config is None:
        return "Interrupted before anything was computed."
    place = config.influence.run_directory or "results/entropy_influence"
    return f"Interrupted. Finished stages are kept in {place}; the same command continues."
