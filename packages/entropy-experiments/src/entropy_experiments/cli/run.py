"""`entropy-probe run`: from a checkpoint to a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from entropy_experiments.cli.job import shared_ending
from entropy_experiments.cli.options import (
    AsJson,
    Checkpoint,
    ConfigFile,
    Debug,
    Overrides,
    Quiet,
    Threads,
    interrupt_message,
    keep_stdout_for_json,
    load_settings,
    print_notes,
    print_results,
    try_to_write,
)

if TYPE_CHECKING:
    from entropy_experiments.config import Config

EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe run\n"
    "  entropy-probe run --checkpoint runs/checkpoint-60 --out results/step_60\n"
    "  entropy-probe run --config my.yaml --set data.evaluation_prompts=256\n"
    "  entropy-probe run --config quick_look --json > results.json"
)


def run(
    config: ConfigFile = None,
    checkpoint: Checkpoint = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write logs, rollouts and results.json below this folder."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace results of other settings in the folder.")
    ] = False,
    as_json: AsJson = False,
    threads: Threads = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Predict what an update does to entropy, measure it, and say what to believe."""
    settings: Config | None = None
    with shared_ending(
        debug=debug, threads=threads, interrupted=lambda: interrupt_message(settings, _kept)
    ) as speaks:
        quiet = quiet or not speaks
        settings = load_settings(config, {}, checkpoint, overrides, under=out)
        print_notes(settings, quiet=quiet)
        try_to_write(settings)

        from entropy_experiments.output_folder import claim_folder
        from entropy_experiments.pipelines.probe import OfflineEntropyProbe

        with (
            keep_stdout_for_json(as_json=as_json),
            claim_folder(out, settings, verb="run", overwrite=overwrite),
        ):
            results = OfflineEntropyProbe(settings, quiet=quiet).run_mixed_probe()
        print_results(results, lambda: results["verdict"], as_json=as_json)


def _kept(config: Config) -> str:
    return (
        f"Finished units of rollouts are kept in {config.rollout_folder}; the same command "
        "continues from them."
    )
