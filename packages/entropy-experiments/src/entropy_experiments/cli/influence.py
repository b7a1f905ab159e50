"""`entropy-probe influence`: which tokens, rollouts and terms moved the entropy; and what if."""

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
    configured,
    interrupted,
    library_aside,
    tell,
    tell_notes,
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
        typer.Option(
            "--what-if", metavar="EXPR", help="Another step (forms: below); may be repeated."
        ),
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Make each what-if's step and measure it.")
    ] = False,
    entropy_budget: Annotated[
        float | None,
        typer.Option("--entropy-budget", metavar="NATS", help="Learning rate that changes H so."),
    ] = None,
    fisher: Annotated[
        bool, typer.Option("--fisher", help="The Fisher kernel of all pairs of rollouts too.")
    ] = False,
    saved: Annotated[
        Path | None,
        typer.Option("--from", help="What-ifs from this run directory, without a model."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another study in the run directory.")
    ] = False,
    as_json: AsJson = False,
    threads: Threads = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Say which tokens, rollouts and optimizer terms moved the entropy, and what if."""
    found: Config | None = None
    with shared_ending(
        debug=debug, threads=threads, interrupted=lambda: interrupted(found, _kept)
    ) as speaks:
        quiet = quiet or not speaks
        if saved is not None:
            given = {"--config": config, "--checkpoint": checkpoint, "--set": overrides}
            given |= {"--out": out, "--confirm": confirm, "--fisher": fisher}
            given |= {"--overwrite": overwrite}
            _from_saved(saved, what_if or [], entropy_budget, given, as_json=as_json)
            return
        changes: dict[str, Any] = {}
        if out is not None:
            changes["influence.folder"] = str(out)
            changes["sampling.save"] = str(out / "rollouts")
        # What is not asked for here is as the file has it.
        asked = {"what_if": what_if, "confirm": confirm, "fisher": fisher}
        changes |= {f"influence.{name}": value for name, value in asked.items() if value}
        if entropy_budget is not None:
            changes["influence.entropy_budget"] = entropy_budget
        found = configured(config, changes, checkpoint, overrides)
        if confirm and not found.influence.what_if:
            raise ValueError(
                "--confirm has nothing to confirm; expected a step to make and measure. Add "
                "--what-if, such as --what-if drop=negative."
            )
        tell_notes(found, quiet=quiet)
        try_to_write(found, found.influence.folder)

        from entropy_experiments.pipelines.influence.runner import EntropyInfluenceRunner
        from entropy_experiments.report.influence_tables import influence_report

        with library_aside(as_json=as_json):
            summary = EntropyInfluenceRunner(found, quiet=quiet).run(overwrite=overwrite)
        files = f"Files: {summary['run_directory']}"
        tell(summary, lambda: [*influence_report(summary), files], as_json=as_json)


def _from_saved(
    folder: Path,
    what_if: list[str],
    entropy_budget: float | None,
    given: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    wrong = [name for name, value in given.items() if value]
    if given["--confirm"]:
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

    found = what_if_from(folder, what_if, entropy_budget=entropy_budget)
    tell(found, lambda: _answers(found), as_json=as_json)


def _answers(found: dict[str, Any]) -> list[str]:
    lines = []
    for evaluation in found["evaluations"]:
        if len(found["evaluations"]) > 1:
            lines.append(f"{evaluation['name']}:")
        lines += [answer["text"] for answer in evaluation["what_if"]]
        if evaluation["entropy_budget"] is not None:
            lines.append(evaluation["entropy_budget"]["text"])
    return lines


def _kept(config: Config) -> str:
    place = config.influence.folder or "results/entropy_influence"
    return f"Finished stages are kept in {place}; the same command continues."
