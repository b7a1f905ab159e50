"""`entropy-probe`: one command, one file per verb.

Nothing heavy is imported until a verb has read its configuration: help answers at once, and a
mistake in a file is reported before torch is loaded.

Exit codes are in `job`, and in docs/reference/commands.md for readers.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from entropy_experiments import __version__
from entropy_experiments.cli import (
    config,
    evaluate,
    explain,
    influence,
    job,
    measure,
    query,
    report,
    run,
    train,
    verify,
)
from entropy_experiments.cli.job import EXIT_CODES, FINDINGS, PACKAGE, ending
from entropy_experiments.cli.plugins import mount_plugins
from entropy_experiments.input_errors import message

UsageError: Any = typer.BadParameter.__bases__[0]
"""click's, or that of the click inside typer: it has no public name of its own."""


class PrintableGroup(TyperGroup):
    """Arguments that are repeated in a message about usage are shown without control characters."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            error.message = message(error.message)
            raise


app = typer.Typer(
    name="entropy-probe",
    cls=PrintableGroup,
    help="How an RL update changes a policy's entropy: predicted, measured, compared.",
    epilog="\b\nExamples:\n"
    "  entropy-probe run                        the policy shipped with the package\n"
    "  entropy-probe run --checkpoint step_60   your own checkpoint\n"
    "  entropy-probe influence                  which tokens changed entropy, and what if\n"
    "  entropy-probe explain                    who changed the entropy of a whole run\n"
    "  entropy-probe train --preset tiny        GRPO with the probe inside\n"
    "  entropy-probe evaluate RUN               pass@k, format, length, entropy over steps\n"
    "  entropy-probe doctor train.py            where do the gradients of a script stop?\n"
    "  entropy-probe arc train                  an ARC solver, its gradients verified\n"
    "  entropy-probe report RUN                 what a finished run says, or several\n"
    '  entropy-probe query RUN "SELECT ..."     tokens, rollouts and ledgers by SQL\n'
    "  entropy-probe verify global_step_60      a verl checkpoint against verl's own merger\n"
    "  entropy-probe config template            a configuration to start from\n\n"
    "\b\nExit codes:\n" + "\n".join(f"  {code:<3}  {what}" for code, what in EXIT_CODES.items()),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("run", epilog=run.EXAMPLES)(run.run)
app.command("measure", epilog=measure.EXAMPLES)(measure.measure)
app.command("influence", epilog=influence.EXAMPLES)(influence.influence)
app.command("explain", epilog=explain.EXAMPLES)(explain.explain)
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("evaluate", epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("query", epilog=query.EXAMPLES)(query.query)
app.command("verify", epilog=verify.EXAMPLES)(verify.verify)
app.add_typer(config.app, name="config")
mount_plugins(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    if context.invoked_subcommand in job.ONE_PROCESS and not job.speaks():
        raise typer.Exit


def main() -> None:
    """The entry point `entropy-probe`."""
    with job.leaving():
        app(prog_name="entropy-probe")


__all__ = ["FINDINGS", "PACKAGE", "app", "ending", "main"]
