"""`entropy-probe train`: GRPO by TRL with the probe inside, and every step on record."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from entropy_experiments.artifacts import try_folder
from entropy_experiments.cli.job import (
    FINDINGS,
    ending,
    is_multi_process,
    on_threads,
    signals_interrupt,
    speaks,
)
from entropy_experiments.cli.options import (
    AsJson,
    Debug,
    Quiet,
    Threads,
    keep_stdout_for_json,
    print_results,
)
from entropy_experiments.input_errors import printable

if TYPE_CHECKING:
    from entropy_experiments.config import TrainingConfig

EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe train                                the embedded default's recipe\n"
    "  entropy-probe train --preset smollm2-gsm8k --out runs/gsm8k --steps 20\n"
    "  entropy-probe train --config my.yaml --set learning_rate=1e-4\n"
    "  entropy-probe train --out runs/gsm8k --resume      after a kill\n"
    "  entropy-probe train --config my.yaml --dry-run     check it, and show the sizes\n"
    "  torchrun --nproc-per-node 2 -m entropy_experiments.cli train --config my.yaml"
)
# Beside a run's checkpoints; see online/train/folder.py, which cannot be imported quickly.
BEGUN_WITH = "entropy_probe_train.yaml"


def train(
    config: Annotated[
        str | None, typer.Option("--config", help="YAML file or template of a training run.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", help="tiny, smollm2-gsm8k or qwen25-15b-lora. Default: tiny."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output folder; overrides output_dir.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Number of optimizer steps; overrides max_steps.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last complete checkpoint.")
    ] = False,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Train without the probe; the weights are the same.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the configuration, print its sizes and stop.")
    ] = False,
    as_json: AsJson = False,
    threads: Threads = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a policy by GRPO; predict and measure what each step does to its entropy."""
    if dry_run and not speaks():
        return
    settings: TrainingConfig | None = None
    option = "max_steps" if steps is None else "--steps"
    alone = nullcontext() if is_multi_process() else signals_interrupt()
    with ending(debug=debug, interrupted=lambda: _interrupt_message(settings)), alone:
        settings = _load_settings(
            config, preset, out, steps, resume=resume, no_probe=no_probe, overrides=overrides or []
        )
        from entropy_experiments.config.training_batch import (
            batch_plan,
            plan_line,
            plan_notes,
            ranks_of_job,
        )

        rank, ranks = ranks_of_job()
        plan = batch_plan(settings, ranks=ranks)
        if not quiet and rank == 0:
            for note in settings.notes:
                typer.echo(printable(f"note: {note}"), err=True)
        if dry_run:
            _check_names(settings)
            words = [f"{settings.source}: valid.", plan_line(settings, plan)]
            notes = plan_notes(settings, plan)
            words += [f"note: {note}" for note in notes]
            facts: dict[str, Any] = {"valid": True, "config": settings.dump(), "notes": notes}
            if resume:
                facts["resumes_from"], line = _would_resume(settings, option)
                words.append(line)
            print_results(facts, lambda: words, as_json=as_json)
            return

        if rank == 0:
            try_folder(settings.output_dir)

        from entropy_experiments.online.train.callbacks import EqualRewardsError, gradient_errors
        from entropy_experiments.online.train.run import train as run
        from entropy_experiments.online.train.summary import summary_words

        try:
            with keep_stdout_for_json(as_json=as_json), on_threads(threads):
                summary = run(settings, resume=resume, quiet=quiet)
        except (EqualRewardsError, *gradient_errors()) as finding:
            if rank == 0:
                typer.echo(f"Error: {printable(finding)}", err=True)
            raise typer.Exit(FINDINGS) from None
        if rank == 0:
            print_results(summary, lambda: summary_words(summary, option=option), as_json=as_json)


def _check_names(config: TrainingConfig) -> None:
    """Refuse a task or rewards that there are not; no data is read."""
    from entropy_experiments.sampling.datasets import check_dataset
    from entropy_experiments.sampling.rewards import build_reward, default_functions

    check_dataset(config.dataset_name)
    functions = config.reward_functions or default_functions(config.dataset_name)
    build_reward(functions, config.reward_weights)


def _load_settings(
    config: str | None,
    preset: str | None,
    out: Path | None,
    steps: int | None,
    *,
    resume: bool,
    no_probe: bool,
    overrides: list[str],
) -> TrainingConfig:
    from entropy_experiments.config import load_preset, load_training
    from entropy_experiments.config.training_reading import replaced, with_overrides

    if config is not None and preset is not None:
        raise ValueError(
            f"--config {config} and --preset {preset} are two configurations. Leave one out."
        )
    if steps is not None and steps < 1:
        raise ValueError(f"--steps is {steps}; expected 1 or more.")
    begun = None if out is None else out / BEGUN_WITH
    if config is not None:
        settings = load_training(config)
    elif preset is not None:
        settings = load_preset(preset)
    elif resume and begun is not None and begun.is_file():
        settings = load_training(begun)  # what the run was begun with
    else:
        if resume and begun is not None:
            _refuse_unknown_run(begun)
        settings = load_training()
    changes: dict[str, Any] = {}
    if out is not None:
        changes["output_dir"] = str(out)
    if steps is not None:
        changes["max_steps"] = steps
    if no_probe:
        changes["probe.enabled"] = False
    settings = replaced(settings, changes, where="the command line")
    return with_overrides(settings, overrides)


def _refuse_unknown_run(begun_with: Path) -> None:
    """Checkpoints that do not say how they were trained are not continued by the default."""
    from entropy_experiments.checkpoints.runs import checkpoints_by_step

    if checkpoints_by_step(begun_with.parent):
        raise ValueError(
            f"{begun_with.parent} has checkpoints, but no {begun_with.name}, which says how they "
            "were trained. Name their configuration with --config, or check --out."
        )


def _would_resume(config: TrainingConfig, option: str) -> tuple[str | None, str]:
    """(checkpoint, line): where --resume would begin. What it would refuse is refused."""
    from entropy_experiments.online.train.folder import (
        ended,
        last_whole_checkpoint,
        refuse_not_begun,
        refuse_other_run,
        steps_made,
    )

    out = Path(config.output_dir)
    refuse_not_begun(out)
    refuse_other_run(out, config)
    checkpoint, _ = last_whole_checkpoint(out)
    if checkpoint is None:
        return None, f"{out} has no whole checkpoint yet: it would begin from the beginning"
    finished_steps = steps_made(checkpoint)
    if finished_steps == config.max_steps and not ended(out, finished_steps):
        line = f"all {finished_steps} steps are made: it would write the end of the run"
        return str(checkpoint), line
    if finished_steps >= config.max_steps:
        from entropy_experiments.online.train.summary import nothing_line

        return str(checkpoint), nothing_line(finished_steps, config.max_steps, option=option)
    return str(checkpoint), f"would continue from {checkpoint}"


def _interrupt_message(config: TrainingConfig | None) -> str:
    if config is None:
        return "Interrupted before anything was computed."
    return (
        f"Interrupted. Checkpoints and recorded steps are in {config.output_dir}; the same command "
        "with --resume continues from the last whole one."
    )
