"""Commands of other packages: `entropy-probe doctor` and `entropy-probe arc` where installed.

A package adds a command by an entry point of the group `entropy_probe.commands`, named as the
command: a `typer.Typer` with commands of its own, or a function `main(argv, *, prog) -> exit code`
that reads its own arguments. The summary of the package is the command's help.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand

GROUP = "entropy_probe.commands"
TYPER = "app"
"""The attribute's name says what it is, so that a function is not imported before it is called."""


class OwnArguments(TyperCommand):
    """A command whose arguments, `--help` among them, are read by the function it calls."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        ctx.args = list(args)
        return []


def mount_plugins(app: typer.Typer) -> None:
    """Add every installed package's command to `app`."""
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name, reverse=True):
        if point.attr == TYPER:
            app.add_typer(point.load(), name=point.name)
        else:
            app.command(point.name, cls=OwnArguments, help=_summary(point))(_calling(point))


def _calling(point: EntryPoint) -> Any:
    def command(context: typer.Context) -> None:
        main = point.load()
        raise typer.Exit(main(context.args, prog=f"entropy-probe {point.name}"))

    return command


def _summary(point: EntryPoint) -> str:
    return str(point.dist.metadata["Summary"]) if point.dist is not None else point.value
