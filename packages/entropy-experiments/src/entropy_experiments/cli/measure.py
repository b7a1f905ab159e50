"""`entropy-probe measure`: measured, linear and quadratic changes over fresh batches."""

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
    "  entropy-probe measure\n"
    "  entropy-probe measure --set measure.repeats=5\n"
    "  entropy-probe measure --set measure.second_order=true --out results/bend\n"
    '  entropy-probe measure --set "measure.learning_rates=[1e-3, 4e-3]" --out sweep\n'
    "  entropy-probe report sweep                in words again, and as HTML\n"
    "  entropy-probe measure --checkpoint runs/checkpoint-60 --json > sweep.json"
)


def measure(
    config: ConfigFile = None,
    checkpoint: Checkpoint = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write rollouts and results.json below this folder."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace results of other settings in the folder.")
    ] = False,
    as_json: AsJson = False,
    threads: Threads = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure an update's entropy change at several step sizes, over fresh batches."""
    settings: Config | None = None
    with shared_ending(
        debug=debug, threads=threads, interrupted=lambda: interrupt_message(settings, _kept)
    ) as speaks:
        quiet = quiet or not speaks
        settings = load_settings(config, {}, checkpoint, overrides, under=out)
        print_notes(settings, quiet=quiet)
        try_to_write(settings)

        from entropy_experiments.output_folder import claim_folder
        from entropy_experiments.pipelines.measure import EntropyMeasurements
        from entropy_experiments.report.measurements import measurement_report

        with (
            keep_stdout_for_json(as_json=as_json),
            claim_folder(out, settings, verb="measure", overwrite=overwrite),
        ):
            results = EntropyMeasurements(settings, quiet=quiet).run_experiments()
        print_results(results, lambda: measurement_report(results), as_json=as_json)


def _kept(config: Config) -> str:
    return (
        f"Finished repeats and rollouts are kept in {config.rollout_folder}; the same command "
        "continues from them."
    )
