"""`entropy-probe config`: templates, the schema, and a check before a long run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from entropy_experiments.artifacts import refuse_special_file
from entropy_experiments.cli.job import ending
from entropy_experiments.cli.options import AsJson, Debug, Overrides, Quiet, print_results
from entropy_experiments.input_errors import printable

app = typer.Typer(
    help="Print a template or the schema; check a file without running it; migrate an old one.",
    epilog="\b\nExamples:\n"
    "  entropy-probe config template --list\n"
    "  entropy-probe config template --out my.yaml\n"
    "  entropy-probe config check my.yaml --set data.evaluation_prompts=256\n"
    "  entropy-probe config migrate old.yaml --out new.yaml\n"
    "  entropy-probe config schema > schema.json",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command(
    epilog="\b\nExamples:\n"
    "  entropy-probe config template                    every key, explained\n"
    "  entropy-probe config template quick_look         small and quick\n"
    "  entropy-probe config template --out my.yaml      into a file"
)
def template(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Which template; --list names them.")
    ] = "all_keys.yaml",
    out: Annotated[Path | None, typer.Option("--out", help="Write to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the names only.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Print a configuration to start from."""
    with ending(debug=debug):
        from entropy_experiments.config import (
            TRAINING_TEMPLATES,
            load_config,
            load_training,
            template_names,
            template_text,
        )

        if names:
            print_results(list(template_names()), template_names, as_json=as_json)
            return
        text = template_text(name)
        training = f"{name.removesuffix('.yaml')}.yaml" in TRAINING_TEMPLATES
        if out is None:
            config = load_training(name) if training else load_config(name)
            print_results(config.dump(), text.splitlines, as_json=as_json)
            return
        _write(out, text, force=force)
        if as_json:
            typer.echo(json.dumps({"written": str(out)}))
        elif not quiet:
            verb = "train" if training else "run"
            typer.echo(f"{out} written. Run it: entropy-probe {verb} --config {out}", err=True)


@app.command(epilog="\b\nExample:\n  entropy-probe config schema > schema.json")
def schema(as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """Print the JSON schema of a configuration, for editors; --json changes nothing."""
    with ending(debug=debug):
        from entropy_experiments.config import json_schema

        typer.echo(json.dumps(json_schema(), indent=2))


@app.command(
    epilog="\b\nExamples:\n"
    "  entropy-probe config check my.yaml\n"
    "  entropy-probe config check my.yaml --set measure.weighting=per_decision"
)
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML file or name of a template.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Validate a configuration; print the keys read under another name or without effect."""
    with ending(debug=debug):
        from entropy_experiments.config import load_config

        config = load_config(file).with_overrides(overrides or [])
        lines = [*([config.translation] if config.translation else []), *config.notes]
        notes = [] if quiet else [f"  note: {line}" for line in lines]
        result = {"source": str(config.source), "valid": True, "notes": lines}
        print_results(result, lambda: [f"{config.source}: valid.", *notes], as_json=as_json)


@app.command(
    epilog="\b\nExamples:\n"
    "  entropy-probe config migrate old.yaml\n"
    "  entropy-probe config migrate old.yaml --out new.yaml"
)
def migrate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML file or name of a template.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a file of the earlier documents' keys under today's. Comments are not kept."""
    with ending(debug=debug):
        from entropy_experiments.config import migrated_yaml

        text, notes = migrated_yaml(file)
        if not quiet:
            for note in notes:
                typer.echo(printable(f"note: left out: {note}"), err=True)
        if out is None:
            result = {"yaml": text, "notes": list(notes)}
            print_results(result, lambda: [text.removesuffix("\n")], as_json=as_json)
            return
        _write(out, text, force=force)
        if as_json:
            typer.echo(json.dumps({"written": str(out), "notes": list(notes)}))
        elif not quiet:
            typer.echo(f"{out} written.", err=True)


def _write(out: Path, text: str, *, force: bool) -> None:
    if out.exists() and not force:
        raise ValueError(f"{out} exists. Choose another name, or overwrite it with --force.")
    refuse_special_file(out)
    out.write_text(text, "utf-8")
