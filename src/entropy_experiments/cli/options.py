"""Options that several verbs have, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from entropy_experiments.config import Config

ConfigFile = Annotated[
    str | None,
    typer.Option("--config", help="YAML file or template. Without it: the quick start."),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="Folder. Without it: the policy in the package."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on the screen.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def tell_notes(config: Config, *, quiet: bool) -> None:
    """What the configuration has to say about itself: keys that no longer mean anything, ..."""
    if not quiet:
        for note in config.notes:
            typer.echo(f"note: {note}", err=True)
