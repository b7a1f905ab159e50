"""Options that several verbs have, each said once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from entropy_experiments.artifacts import named_os_errors, try_outputs
from entropy_experiments.cli.job import speaks
from entropy_experiments.input_errors import printable

if TYPE_CHECKING:
    from entropy_experiments.config import Config

ConfigFile = Annotated[
    str | None,
    typer.Option("--config", help="YAML file or template. Default: the quick start."),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", help="Folder, or embedded/checkpoint-N of the package. Default: N = 13."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="CPU threads. Default: OMP_NUM_THREADS, or the fastest number.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress and no notes.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
STDOUT, STDERR = 1, 2


def load_settings(
    config: str | None,
    changes: Mapping[str, Any],
    checkpoint: Path | None,
    overrides: list[str] | None,
    *,
    under: Path | None = None,
) -> Config:
    """The file, then the options, then --set: the most explicit wins."""
    from entropy_experiments.config import load_config

    settings = load_config(config)
    if under is not None:
        settings = settings.under(under)
    if checkpoint is not None:
        changes = {**changes, "checkpoint.path": str(checkpoint)}
    settings = settings.replaced(changes, where="the command line")
    return settings.with_overrides(overrides or [])


def try_to_write(config: Config, *more: str | Path | None) -> None:
    """Every place that the configuration (and `more`: folders) names for output, before computing.

    On rank 0 alone, which writes.
    """
    if not speaks():
        return
    logs = config.output.folder if config.output.log else None
    try_outputs((logs, config.rollout_folder, *more), (config.output.results_file,))


@contextmanager
def keep_stdout_for_json(*, as_json: bool) -> Iterator[None]:
    """With --json, stdout carries JSON and nothing else, whatever a library or a child prints."""
    if not as_json:
        yield
        return
    with _descriptor_to_stderr(sys.stdout), redirect_stdout(sys.stderr):
        yield


@contextmanager
def _descriptor_to_stderr(stdout: TextIO | None) -> Iterator[None]:
    """Inside, descriptor 1, which child processes and C libraries write to, is descriptor 2."""
    if stdout is None or sys.stderr is None:  # closed by whoever started this
        yield
        return
    stdout.flush()
    saved = os.dup(STDOUT)
    try:
        os.dup2(STDERR, STDOUT)
        yield
    finally:
        if not stdout.closed:
            stdout.flush()  # what was written to the stream itself meanwhile
        os.dup2(saved, STDOUT)
        os.close(saved)


def print_results(results: Any, words: Callable[[], Sequence[str]], *, as_json: bool) -> None:
    """Results as JSON, or in words."""
    if as_json:
        text = json.dumps(results, indent=2, allow_nan=False)
    else:
        text = printable("\n".join(words()))
    with named_os_errors("standard output"):
        typer.echo(text)


def interrupt_message(config: Config | None, kept: Callable[[Config], str]) -> str:
    """What Ctrl-C leaves behind: `kept` says where."""
    if config is None:
        return "Interrupted before anything was computed."
    return f"Interrupted. {kept(config)}"


def print_notes(config: Config, *, quiet: bool) -> None:
    """What the configuration has to say about itself: keys that no longer mean anything, ..."""
    if not quiet:
        for note in [*([config.translation] if config.translation else []), *config.notes]:
            typer.echo(printable(f"note: {note}"), err=True)
