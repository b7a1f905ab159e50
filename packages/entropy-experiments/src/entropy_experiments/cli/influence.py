"""`entropy-probe influence`: which tokens, rollouts and terms changed the entropy; and what if."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from entropy_experiments.attribution.whatif_grammar import help_lines
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
    "\b\nWhat-ifs, each an EXPR of --what-if:\n"
    + "\n".join(f"  {line}" for line in help_lines())
    + "\n\n\b\nExamples:\n"
    "  entropy-probe influence\n"
    "  entropy-probe influence --checkpoint runs/checkpoint-60 --out results/step_60\n"
    "  entropy-probe influence --what-if drop=negative --what-if clip_high=0.28 --confirm\n"
    "  entropy-probe influence --out results/step_60 --fisher\n"
    "  entropy-probe influence --momentum 30\n"
    "  entropy-probe influence --from results/step_60 --what-if 'drop=p<0.1&A<0'\n"
    "  entropy-probe influence --entropy-budget -0.02 --json > influence.json"
)


def influence(
    config: ConfigFile = None,
    checkpoint: Checkpoint = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory. Default: results/entropy_influence/..."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="EXPR",
            help="A changed step to answer for (forms: below); may be repeated.",
        ),
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Take each what-if's step and measure its effect.")
    ] = False,
    entropy_budget: Annotated[
        float | None,
        typer.Option(
            "--entropy-budget",
            metavar="NATS",
            help="Find the learning rate that changes entropy by this many nats.",
        ),
    ] = None,
    fisher: Annotated[
        bool,
        typer.Option("--fisher", help="Also compute the Fisher kernel of all pairs of rollouts."),
    ] = False,
    momentum: Annotated[
        int | None,
        typer.Option(
            "--momentum",
            metavar="N",
            min=0,
            help="Split momentum among at most N earlier batches; 0: leave it one line. Default, "
            "in a recorded run: at most 30, at no more than the cost of the rest.",
        ),
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Answer what-ifs from this run directory, without loading a model."
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace another influence study in the run directory."),
    ] = False,
    as_json: AsJson = False,
    threads: Threads = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Say which tokens, rollouts and optimizer terms changed the entropy, and what if."""
    settings: Config | None = None
    with shared_ending(
        debug=debug, threads=threads, interrupted=lambda: interrupt_message(settings, _kept)
    ) as speaks:
        quiet = quiet or not speaks
        if saved is not None:
            options = {"--config": config, "--checkpoint": checkpoint, "--set": overrides}
            options |= {"--out": out, "--confirm": confirm, "--fisher": fisher}
            options |= {"--overwrite": overwrite, "--momentum": momentum is not None}
            _from_saved(saved, what_if or [], entropy_budget, options, as_json=as_json)
            return
        changes: dict[str, Any] = {}
        if out is not None:
            changes["influence.folder"] = str(out)
            changes["sampling.save"] = str(out / "rollouts")
        # What is not asked for here is as the file has it.
        analyses = {"what_if": what_if, "confirm": confirm, "fisher": fisher}
        changes |= {f"influence.{name}": value for name, value in analyses.items() if value}
        if entropy_budget is not None:
            changes["influence.entropy_budget"] = entropy_budget
        settings = load_settings(config, changes, checkpoint, overrides)
        if confirm and not settings.influence.what_if:
            raise ValueError(
                "--confirm has nothing to confirm; expected a step to make and measure. Add "
                "--what-if, such as --what-if drop=negative."
            )
        print_notes(settings, quiet=quiet)
        try_to_write(settings, settings.influence.folder)

        from entropy_experiments.pipelines.influence.runner import EntropyInfluenceRunner
        from entropy_experiments.report.influence_tables import influence_report

        with keep_stdout_for_json(as_json=as_json):
            summary = EntropyInfluenceRunner(settings, quiet=quiet).run(
                overwrite=overwrite, momentum_batches=momentum
            )
        files = f"Files: {summary['run_directory']}"
        print_results(summary, lambda: [*influence_report(summary), files], as_json=as_json)


def _from_saved(
    folder: Path,
    what_if: list[str],
    entropy_budget: float | None,
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    wrong = [name for name, value in options.items() if value]
    if options["--confirm"]:
        raise ValueError(
            f"{', '.join(wrong)} together with --from: confirming makes the step, which needs the "
            "model. Repeat the study's own command (without --from) with the same --out, this "
            "--what-if and --confirm; finished stages are reused."
        )
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} together with --from: a saved table is read without a model. "
            "Leave them out, or run the study again without --from."
        )
    if not what_if and entropy_budget is None:
        raise ValueError("--from has no question; expected --what-if or --entropy-budget.")

    from entropy_experiments.pipelines.influence.runner import what_if_from

    answers = what_if_from(folder, what_if, entropy_budget=entropy_budget)
    print_results(answers, lambda: _answers(answers), as_json=as_json)


def _answers(answers: dict[str, Any]) -> list[str]:
    lines = []
    for evaluation in answers["evaluations"]:
        if len(answers["evaluations"]) > 1:
            lines.append(f"{evaluation['name']}:")
        lines += [answer["text"] for answer in evaluation["what_if"]]
        if evaluation["entropy_budget"] is not None:
            lines.append(evaluation["entropy_budget"]["text"])
    return lines


def _kept(config: Config) -> str:
    place = config.influence.folder or "results/entropy_influence"
    return f"Finished stages are kept in {place}; the same command continues."
