"""Write what repeats what the code says: keys, commands, the API's pages and its stubs.

    python docs/make_reference.py          # part of `make docs`

The files are committed, so that they can be read without building anything; a test asserts that
they are what this script writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

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
BELOW = "<!-- Below: written by docs/make_reference.py; `make docs` writes it again. -->\n"
"""Ends what is written by hand in a page that explains keys and then lists them."""

Schema = Mapping[str, Any]


def explanation(page: str) -> str:
    """The hand-written part of a page, up to and with the mark."""
    text = (DOCS / page).read_text("utf-8")
    if text.count(BELOW) != 1:
        raise ValueError(
            f"docs/{page}: got {text.count(BELOW)} marks; expected one. Put this line between the "
            f"explanation and the list of keys: {BELOW.strip()}"
        )
    return text.partition(BELOW)[0] + BELOW


def config_page() -> str:
    """How to configure, then every key of the schema: kind, default, meaning."""
    schema, defaults = json_schema(), known_fields()
    page = [
        explanation("config.md"),
        "## All keys\n",
        "Every section and every key is optional. `null` means *not given*. The same as JSON",
        "schema, for editors: `entropy-probe config schema`.\n",
    ]
    for name, info in Config.model_fields.items():
        kind = type(info.default)
        page += [f"### {name}\n", f"{_line(kind.__doc__)}\n", *_header()]
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
    """How to train, then every key of `entropy-probe train`."""
    schema = training_schema()
    # The keys are flat: the whole file is one section.
    schema["$defs"][TrainingConfig.__name__] = {"properties": schema["properties"]}
    page = [
        explanation("howto_train.md"),
        "## All keys\n",
        "The file of `entropy-probe train --config`. Every key is optional.\n",
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

| code | `run`, `measure`, `influence`, `train`, `evaluate`, `report`, `verify`, `config`, `arc` | `doctor` |
|---|---|---|
| 0 | done | no finding of warning or above |
| 1 | a bug: please report the traceback | the script crashed; its traceback and the diagnosis are printed |
| 2 | bad input: a key, a file, a checkpoint, too little memory. The message says what to change | bad usage: nothing was run |
| 3 | `arc train`: a gradient contract is broken; the message names parameters and fix. `train`: no group of the first five steps had two different rewards, or `doctor.raise_on` ended it. `verify`: verl's merger makes another model | findings of warning or above; with `--entropy`, a case is wrong |
| 129 | SIGHUP, as when the terminal is closed: as 130 | |
| 130 | interrupted by Ctrl-C. Current work is saved; run the same command to resume (`arc train` with `--resume`) | interrupted; the report so far is printed |
| 141 | the reader of stdout left, as `head` does: files are written, the text is cut | |
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
        "# Which commands and exit codes are there?\n",
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


class Group(NamedTuple):
    """A page of the API reference: exported names that belong together."""

    title: str
    about: str
    names: Mapping[str, tuple[str, ...]]
    """By package, in the order of the page."""


PROBE, DOCTOR, ARC = "entropy_experiments", "gradient_doctor", "arc_refine"
DISTRIBUTIONS = {PROBE: "entropy-experiments", DOCTOR: "gradient-doctor", ARC: "arc-refine"}
API = {
    "policy": Group(
        "Policy and rollouts",
        "What an estimator knows of a model, and what was sampled from it.",
        {
            PROBE: (
                *("Policy", "NucleusPolicy", "Params", "Scores", "Rollouts", "UpdateBatch"),
                *("SequenceProcessor", "token_scores", "response_scores", "response_support"),
            )
        },
    ),
    "update": Group(
        "Update",
        "A batch becomes a direction: the loss, the optimizer's step rebuilt exactly, "
        "certificates. Formulas: [theory](../theory.md).",
        {
            PROBE: (
                *("Objective", "token_coefficients", "loss_gradient", "Direction"),
                *("compute_update_vector_adamw", "adamw_direction", "sgd_direction", "observed"),
                *("OptimizerState", "AdamGroup", "SGDGroup", "read_state"),
                *("optimizer_certificate", "step_certificate"),
            )
        },
    ),
    "estimators": Group(
        "Estimators",
        "What entropy does along a direction: predicted, measured, drawn afresh.",
        {
            PROBE: (
                *("Estimate", "Estimand", "EstimatorOptions", "entropy_level", "first_order"),
                *("first_order_by_part", "entropy_gradient", "curvature", "measured"),
                *("measured_many", "Case", "odd_and_even", "resampled"),
            )
        },
    ),
    "attribution": Group(
        "Attribution",
        "One step, analysed in memory: predicted, measured, and split by cause.",
        {PROBE: ("analyze_step", "StepOptions", "StepAnalysis", "Attribution", "what_if_from")},
    ),
    "runners": Group(
        "Runners",
        "Whole analyses from a checkpoint to files, as the commands run them, and their "
        "[configuration](../config.md).",
        {
            PROBE: (
                *("OfflineEntropyProbe", "EntropyMeasurements", "ExperimentPlan"),
                *("EntropyInfluenceRunner", "EntropyInfluencePlan", "WorkspaceSpec"),
                *("BatchRequest", "probe_trajectory", "evaluate_checkpoints", "EvaluationRequest"),
                *("Config", "load_config", "parse_config", "DetailedLogger", "read_log"),
            )
        },
    ),
    "online": Group(
        "Inside training",
        "The probe in TRL's trainers and in a loop of your own "
        "([how to](../howto_online.md)), the [record of any loop](../howto_any_loop.md), and the "
        "gradient noise scale.",
        {PROBE: ("EntropyProbeCallback", "LoopProbe", "StepRecorder", "NoiseScale")},
    ),
    "checkpoints": Group(
        "Checkpoints and sampling",
        "What training left on disk, and rollouts drawn from it.",
        {
            PROBE: (
                *("load_checkpoint", "load_base_model", "embedded_trajectory", "SampleGenerator"),
                *("save_rollouts", "load_rollouts", "save_update_batch", "load_update_batch"),
                "batch_from_tensors",
            )
        },
    ),
    "doctor": Group(
        "Gradient doctor and ARC trainer",
        "`gradient_doctor` finds out why nothing learns ([how to](../doctor.md)); `arc_refine` is "
        "the [ARC trainer](../arc.md).",
        {
            DOCTOR: (
                *("Doctor", "preflight", "Finding", "Severity", "Site"),
                *("score_test", "ScoreTest", "check_entropy"),
            ),
            ARC: (
                *("TrainConfig", "load_tasks", "Task", "Pair", "leave_one_out", "collate"),
                *("EFE", "EfeWeights", "RefinePolicy", "PolicyRL", "QwenHybridPrompt", "QwenCfg"),
                *("Breach", "ContractError"),
            ),
        },
    ),
}


def api_page(group: Group) -> str:
    """Headings and docstrings of a group's names; mkdocstrings puts them in."""
    page = [BY_HAND, f"# {group.title}\n", f"{group.about}\n"]
    for package, names in group.names.items():
        page.append(f"Examples assume `from {package} import *`; tests run them.\n")
        page += [f"::: {package}.{name}\n" for name in names]
    return "\n".join(page).rstrip() + "\n"


def stub(package: str) -> str:
    """`__init__.pyi`: the lazy names of a package, as type checkers read them."""
    module = import_module(package)
    by_home: dict[str, list[str]] = {}
    for name, home in module._HOME.items():
        by_home.setdefault(home, []).append(name)
    lines = ["# Written by docs/make_reference.py from _HOME: `make docs` writes it again."]
    for home, members in sorted(by_home.items()):
        members.sort(key=lambda name: (_kind_of_name(name), name.lower()))
        line = f"from {package}.{home} import {', '.join(members)}"
        if len(line) <= 100:
            lines.append(line)
        else:
            lines += [f"from {package}.{home} import (", *(f"    {name}," for name in members), ")"]
    names = sorted(module._HOME, key=lambda name: (_kind_of_name(name), name))
    if hasattr(module, "__version__"):
        lines += ["", "__version__: str"]
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in names), "]"]
    return "\n".join(lines) + "\n"


def _kind_of_name(name: str) -> int:
    """The order of sorted imports: constants, classes, functions."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2


def _stub_path(package: str) -> Path:
    folder = DOCS.parent / "packages" / DISTRIBUTIONS[package] / "src"
    return folder / package / "__init__.pyi"


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "config.md": config_page,
    DOCS / "howto_train.md": training_page,
    DOCS / "reference" / "commands.md": commands_page,
    **{DOCS / "api" / f"{name}.md": partial(api_page, group) for name, group in API.items()},
    **{_stub_path(package): partial(stub, package) for package in DISTRIBUTIONS},
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
