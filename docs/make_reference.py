"""Write the pages that repeat what the code says: keys and commands.

    python docs/make_reference.py          # part of `make docs`

The pages are committed, so that they can be read without building anything; a test asserts that
they are what this script writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typer.main import get_command
from typer.testing import CliRunner

from entropy_experiments.cli import app
from entropy_experiments.config import (
    Config,
    TrainingConfig,
    json_schema,
    known_fields,
    training_schema,
)
from entropy_experiments.config.documents import ALIASES, RETIRED
from entropy_experiments.config.training_reading import TRAINING_ALIASES, known_training_fields

DOCS = Path(__file__).parent
WIDTH = 96
BY_HAND = "<!-- Written by docs/make_reference.py: `make docs` writes it again. -->\n"

Schema = Mapping[str, Any]


def config_page() -> str:
    """Every key of the schema: kind, default, meaning."""
    schema, defaults = json_schema(), known_fields()
    page = [
        BY_HAND,
        "# Configuration reference\n",
        "Every section and every key is optional. `null` means *not given*. How files are read,",
        "and which templates there are: [the configuration](../config.md). The same as JSON",
        "schema, for editors: `entropy-probe config schema`.\n",
    ]
    for name, info in Config.model_fields.items():
        kind = type(info.default)
        page += [f"## {name}\n", f"{_line(kind.__doc__)}\n", *_header()]
        page += _rows(kind, schema, defaults[name], prefix="")
        page.append("")
    page += ["## Keys of the earlier documents\n"]
    page += [
        "Read as the schema's keys, which `entropy-probe config migrate FILE` writes. Two names"
    ]
    page += ["of one setting with different values are an error.\n"]
    page += ["| key | is read as |", "|---|---|"]
    page += [f"| `{alias.spelling}` | {_alias(alias)} |" for alias in ALIASES]
    page += ["", "## Keys without effect\n"]
    page += ["Accepted from files of the earlier scripts, with a note on the screen.\n"]
    page += ["| key | why it has none |", "|---|---|"]
    page += [f"| `{key}` | {_cell(why)} |" for key, why in RETIRED.items()]
    return "\n".join(page) + "\n"


def training_page() -> str:
    """Every key of `entropy-probe train`."""
    schema = training_schema()
    # The keys are flat: the whole file is one section.
    schema["$defs"][TrainingConfig.__name__] = {"properties": schema["properties"]}
    page = [
        BY_HAND,
        "# Training configuration reference\n",
        "The file of `entropy-probe train --config`. Every key is optional. Meanings and",
        "presets: [how to train with the probe inside](../howto_train.md).\n",
        *_header(),
        *_rows(TrainingConfig, schema, known_training_fields(), prefix=""),
        "",
        "## Other names\n",
        "One setting under two names. Given different values, they are an error.\n",
        "| key | is read as |",
        "|---|---|",
    ]
    page += [f"| `{alias.spelling}` | `{alias.canonical}` |" for alias in TRAINING_ALIASES]
    return "\n".join(page) + "\n"


EXIT_CODES = """\
## Exit codes

| code | `run`, `measure`, `influence`, `train`, `evaluate`, `report`, `config`, `arc` | `doctor` |
|---|---|---|
| 0 | done | no finding of warning or above |
| 1 | a bug: please report the traceback | the script crashed; its traceback and the diagnosis are printed |
| 2 | bad input: a key, a file, a checkpoint, too little memory. The message says what to change | bad usage: nothing was run |
| 3 | `arc train`: a gradient contract is broken; the message names parameters and fix. `train`: no group of the first five steps had two different rewards, or `doctor.raise_on` ended it | findings of warning or above; with `--entropy`, a case is wrong |
| 129 | SIGHUP, as when the terminal is closed: as 130 | |
| 130 | interrupted by Ctrl-C. Current work is saved; run the same command to resume (`arc train` with `--resume`) | interrupted; the report so far is printed |
| 143 | SIGTERM, from a scheduler: as 130; [under torchrun](../howto_scale.md#when-something-fails) after storing the current unit | |
| other | | the script's own `sys.exit(n)` |

torchrun has exit codes of its own: 1 whenever one of its processes ended with a code above 0 or by a signal.

A number that is not trusted is no error: the code is 0, and the results contain `"trusted": false`. In a script:

```console
entropy-probe run --checkpoint runs/grpo/checkpoint-340 --json > results.json
```

With `--json`, standard output carries JSON and nothing else; progress and messages go to standard error.
`--debug` shows the traceback behind a message of code 2.
"""  # noqa: E501


def commands_page() -> str:
    """`--help` of every command, and what their exit codes mean."""
    page = [
        BY_HAND,
        "# Commands and exit codes\n",
        "What `entropy-probe COMMAND --help` prints. Help does not import torch. `doctor` and",
        "`arc` exist when their packages are installed ([install](../install.md)).",
        "[Exit codes](#exit-codes) are at the end.\n",
    ]
    for words in _verbs(get_command(app)):
        found = CliRunner().invoke(
            app,
            [*words, "--help"],
            prog_name="entropy-probe",
            terminal_width=WIDTH,
            max_content_width=WIDTH,
        )
        assert found.exit_code == 0, found.output
        text = "\n".join(line.rstrip() for line in found.stdout.strip().splitlines())
        page += [f"## {' '.join(['entropy-probe', *words])}\n", "```text", text, "```\n"]
    return "\n".join([*page, EXIT_CODES]).rstrip() + "\n"


PAGES = {
    DOCS / "reference" / "config.md": config_page,
    DOCS / "reference" / "training.md": training_page,
    DOCS / "reference" / "commands.md": commands_page,
}


def _verbs(command: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield before
    for name, inner in getattr(command, "commands", {}).items():
        yield from _verbs(inner, (*before, name))


def _header() -> list[str]:
    return ["| key | value | default | meaning |", "|---|---|---|---|"]


def _rows(kind: type[BaseModel], schema: Schema, default: Any, prefix: str) -> Iterator[str]:
    properties = schema["$defs"][kind.__name__]["properties"]
    for name, info in kind.model_fields.items():
        inner = _section(info.annotation)
        if inner is not None and not isinstance(default[name], list):
            yield f"| `{prefix}{name}` | section | | {_cell(info.description)} |"
            yield from _rows(inner, schema, default[name], prefix=f"{prefix}{name}.")
            continue
        value = _cell(_kind(properties[name], schema) + _limits(info))
        usual, meaning = _plain(default[name]), _cell(info.description)
        yield f"| `{prefix}{name}` | {value} | `{usual}` | {meaning} |"


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field is, or may be."""
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _kind(found: Schema, schema: Schema) -> str:
    """A property of the schema in words."""
    if "$ref" in found:
        inner = schema["$defs"][found["$ref"].split("/")[-1]]
        return "{" + ", ".join(inner["properties"]) + "}"
    if "anyOf" in found:
        return " or ".join(
            _kind(one, schema) for one in found["anyOf"] if one.get("type") != "null"
        )
    if "enum" in found or "const" in found:
        return ", ".join(f"`{value}`" for value in found.get("enum", [found.get("const")]))
    if found.get("type") == "array":
        one, comma, bounds = _kind(found["items"], schema).partition(",")
        plural = {"number": "numbers", "whole number": "whole numbers", "text": "texts"}
        return f"list of {plural.get(one, one)}{comma}{bounds}"
    names = {"boolean": "`true`, `false`", "integer": "whole number", "number": "number"}
    names |= {"string": "text", "object": "keys and values"}
    return names.get(found.get("type", ""), "anything") + _bounds(found)


def _bounds(found: Schema) -> str:
    signs = {"exclusiveMinimum": "above", "minimum": "at least"}
    signs |= {"exclusiveMaximum": "below", "maximum": "at most"}
    said = [f"{word} {found[name]:g}" for name, word in signs.items() if name in found]
    return f", {', '.join(said)}" if said else ""


def _limits(info: Any) -> str:
    """Bounds of numbers that are also read from text, which the schema leaves out."""
    if "float" not in str(info.annotation) and info.annotation is not float:
        return ""
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found = {}
    for one in _metadata(info):
        found |= {name: getattr(one, name) for name in words if hasattr(one, name)}
    return "".join(f", {words[name]} {found[name]:g}" for name in words if name in found)


def _metadata(info: Any) -> Iterator[Any]:
    """Of a field, and of the kinds that its annotation is made of."""
    for one in getattr(info, "metadata", None) or getattr(info, "__metadata__", ()):
        yield one
        yield from getattr(one, "metadata", ())
    for inner in getattr(getattr(info, "annotation", info), "__args__", ()):
        yield from _metadata(inner)


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_plain(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _alias(alias: Any) -> str:
    said = f"`{alias.canonical}`"
    if alias.values is not None:
        pairs = (f"{_plain(own)} is `{other}`" for own, other in alias.values.items())
        said += f" ({', '.join(pairs)})"
    return said


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str | None) -> str:
    """Angle brackets are no HTML here, and a bar would end the cell."""
    return _line(text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def main() -> None:
    for path, page in PAGES.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        text = page()
        if not path.is_file() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"{path.relative_to(DOCS.parent)} written")


if __name__ == "__main__":
    main()
