"""`entropy-probe evaluate`: checkpoints on a task, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from entropy_experiments.artifacts import try_folder
from entropy_experiments.cli.job import shared_ending
from entropy_experiments.cli.options import (
    AsJson,
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
)

if TYPE_CHECKING:
    from entropy_experiments.config import Config

EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe evaluate                    a few checkpoints of the embedded run\n"
    "  entropy-probe evaluate runs/checkpoint-100 runs/checkpoint-200 --out results/two\n"
    "  entropy-probe evaluate runs --task gsm8k_r1_template --split test --k 1,4,8\n"
    "  entropy-probe evaluate runs --task questions.jsonl --reward answer_exact\n"
    "  entropy-probe evaluate --prompts 16 --samples 4 --json > evaluation.json"
)
JSONL = (".jsonl", ".json")


def evaluate(
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoint folders; a run's folder means all of its checkpoints.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task", metavar="NAME_OR_JSONL", help="Dataset. Default: the one used in training."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="Local file of a named --task."),
    ] = None,
    split: Annotated[str | None, typer.Option("--split", help="Split of the dataset.")] = None,
    prompts: Annotated[int, typer.Option("--prompts", help="Number of prompts.")] = 64,
    samples: Annotated[int, typer.Option("--samples", help="Responses per prompt.")] = 8,
    k: Annotated[
        str | None,
        typer.Option("--k", metavar="K,K,...", help="Values of k for pass@k. Default: 1,4,8."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of prompts and responses.")
    ] = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="NAME",
            help="Reward that counts as a pass at 1 or more; may be repeated.",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            metavar="NATS",
            help="Entropy above which a token counts as uncertain. Default: ln 2.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder. Default: results/evaluations/..."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another evaluation in the folder.")
    ] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    threads: Threads = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Pass rate, pass@k, format, length and entropy of checkpoints, on the same prompts."""
    settings: Config | None = None
    with shared_ending(
        debug=debug,
        threads=threads,
        interrupted=lambda: interrupt_message(settings, lambda _: _kept(out)),
    ) as speaks:
        quiet = quiet or not speaks
        changes = _changes(task, data, split, seed)
        settings = load_settings(config, changes, None, overrides)
        print_notes(settings, quiet=quiet)
        if speaks and out is not None:
            try_folder(out)
        ks = None if k is None else _numbers(k)

        from entropy_experiments.pipelines.evaluate import evaluate_checkpoints
        from entropy_experiments.pipelines.evaluation_request import EvaluationRequest
        from entropy_experiments.report.evaluation_tables import evaluation_report

        request = EvaluationRequest(
            prompts=prompts,
            samples=samples,
            ks=ks,
            rewards=tuple(rewards) if rewards else None,
            threshold=EvaluationRequest.threshold if threshold is None else threshold,
        )
        with keep_stdout_for_json(as_json=as_json):
            result = evaluate_checkpoints(
                checkpoints or (),
                settings,
                request=request,
                out=out,
                overwrite=overwrite,
                quiet=quiet,
            )
        files = f"Files: {result['folder']}"
        print_results(result, lambda: [*evaluation_report(result), "", files], as_json=as_json)


def _changes(
    task: str | None, data: Path | None, split: str | None, seed: int | None
) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if task is not None and (task.endswith(JSONL) or Path(task).exists()):
        if data is not None:
            raise ValueError(
                f"--task is the file {task} already; --data {data} belongs to a named dataset. "
                "Leave one out."
            )
        changes |= {"data.dataset": "jsonl", "data.file": task}
    elif task is not None:
        changes["data.dataset"] = task
    if data is not None:
        changes["data.file"] = str(data)
    if split is not None:
        changes["data.evaluation_split"] = split
    if seed is not None:
        changes["sampling.seed"] = seed
    return changes


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"--k is {text!r}; expected whole numbers with commas, such as 1,4,8."
        ) from None


def _kept(out: Path | None) -> str:
    place = out or "results/evaluations"
    return f"What is finished is kept in {place}; the same command continues."
