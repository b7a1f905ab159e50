"""`entropy-probe doctor`: where did the gradient stop? The command line of `gradient_doctor`."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Annotated

import typer
from typer.core import TyperCommand

from entropy_experiments.cli.job import speaks

EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe doctor train.py --lr 1e-3\n"
    "  entropy-probe doctor --json doctor.json --contract contract.json train.py\n"
    "  entropy-probe doctor -m my_package.train --lr 1e-3\n"
    "  entropy-probe doctor --entropy my_module:token_entropy\n"
    "\n\b\n"
    "Exit codes: 0 nothing of warning or above, 3 findings of warning or above,\n"
    "1 the script crashed, 2 bad usage, 130 interrupted; otherwise the script's own."
)


class ScriptCommand(TyperCommand):
    """A command whose options end where the program begins."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        from gradient_doctor.command import split

        ours, program = split(args)
        return super().parse_args(ctx, [*ours, "--", *program])


def doctor(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]",
            show_default=False,
            help="A script, or -m and a module; what follows is its own.",
        ),
    ] = None,
    contract: Annotated[
        str | None,
        typer.Option("--contract", metavar="FILE", help="JSON: what must train, what must not."),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the report as JSON, too; -: on stdout."),
    ] = None,
    mode: Annotated[str, typer.Option("--mode", help="auto, trace, light or off.")] = "auto",
    trace_steps: Annotated[
        int, typer.Option("--trace-steps", metavar="N", help="Steps to trace fully at the start.")
    ] = 3,
    every: Annotated[
        int, typer.Option("--every", metavar="N", help="Afterwards, look at every N-th step.")
    ] = 50,
    quiet: Annotated[bool, typer.Option("--quiet", help="No report on the screen.")] = False,
    entropy: Annotated[
        str | None,
        typer.Option(
            "--entropy",
            metavar="MODULE:FUNCTION",
            help="Check an entropy function on golden cases.",
        ),
    ] = None,
) -> None:
    """Run a training script and say where its gradients stop, and why."""
    if entropy is not None and not speaks():
        return  # a function, not a training: nothing is shared
    from gradient_doctor.command import Options, UsageError, run

    on_stdout = json == "-"
    place = Path(mkdtemp()) / "doctor.json" if on_stdout else None
    options = Options(
        program=tuple(program or ()),
        contract=contract,
        json=str(place) if place else json,
        mode=mode,
        trace_steps=trace_steps,
        every=every,
        quiet=quiet,
        entropy=entropy,
    )
    try:
        # With --json - stdout carries JSON and nothing else, whatever the script prints.
        with redirect_stdout(sys.stderr) if on_stdout else nullcontext():
            code = run(options)
        if place is not None and place.is_file():
            typer.echo(place.read_text("utf-8"), nl=False)
    except UsageError as wrong:
        typer.echo(f"Error: {wrong}", err=True)
        code = 2
    finally:
        if place is not None:
            rmtree(place.parent, ignore_errors=True)
    raise typer.Exit(code)
