"""`entropy-probe`: one command, one file per verb.

Nothing heavy is imported until a verb has read its configuration: help answers at once, and a
mistake in a file is reported before torch is loaded.

Exit codes: 0 done, 1 unexpected, 2 bad input (the message says what to change), 130 interrupted.
"""

from __future__ import annotations

from typing import Annotated

import typer

from entropy_experiments import __version__
from entropy_experiments.cli import config, influence, measure, report, run

app = typer.Typer(
    name="entropy-probe",
    help="How an RL update changes a policy's entropy: predicted, measured, compared.",
    epilog="\b\nExamples:\n"
    "  entropy-probe run                        the policy shipped with the package\n"
    "  entropy-probe run --checkpoint step_60   your own checkpoint\n"
    "  entropy-probe influence                  which tokens moved the entropy, and what if\n"
    "  entropy-probe config template            a configuration to start from",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("run", epilog=run.EXAMPLES)(run.run)
app.command("measure", epilog=measure.EXAMPLES)(measure.measure)
app.command("influence", epilog=influence.EXAMPLES)(influence.influence)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.add_typer(config.app, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point `entropy-probe`."""
    app(prog_name="entropy-probe")


__all__ = ["app", "main"]
