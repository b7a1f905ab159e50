"""From a file, a name of a template or a plain dict to a `Config`; and back to YAML."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

import yaml

from entropy_experiments.config.fields import Section
from entropy_experiments.config.model import TEMPLATE, Config, validated
from entropy_experiments.config.problems import ConfigError
from entropy_experiments.config.yaml_dialect import parse_text
from entropy_experiments.input_errors import check_regular, expand_path

DEFAULT_TEMPLATE = "quick_start.yaml"
"""What a command runs without --config, on the policy in the package."""
FULL_TEMPLATE = "all_keys.yaml"
"""Every key of the schema, explained: what `entropy-probe config template` prints."""
DOCUMENTS_TEMPLATES = {
    "config_template.yaml": FULL_TEMPLATE,
    "detailed_logging_example.yaml": DEFAULT_TEMPLATE,
    "test_deltaH1.yaml": "quick_look.yaml",
    "entropy_probe_test_optimized.yaml": "train_probe_test.yaml",
    "overnight_config.yaml": "train_overnight.yaml",
}
"""Templates in the documents' dialect, under the documents' names, and the same in the schema's."""

TRAINING_TEMPLATES = (
    "entropy_probe_test_optimized.yaml",
    "overnight_config.yaml",
    "train_overnight.yaml",
    "train_probe_test.yaml",
    "train_qwen25_15b_lora.yaml",
    "train_smollm2_gsm8k.yaml",
    "train_tiny.yaml",
)
"""Those of `entropy-probe train`; see `training_reading`."""

LARGEST_FILE = 4 * 2**20
"""Bytes of a configuration."""
TEMPLATE_FOLDERS = {"", ".", "configs", "entropy_experiments/configs", "rl_training/cfg"}
"""Folders under which the documents name the templates; they need not exist."""


def parse_config(mapping: Mapping[str, Any], *, source: str = "config") -> Config:
    """A configuration from a plain nested dict, as full or as empty as you like.

    Args:
        mapping: Sections with their keys.
        source: What errors call it.

    Returns:
        The configuration, checked.

    Raises:
        ConfigError: If a key is unknown or a value cannot be used; with the dotted key.

    Examples:
        >>> isinstance(parse_config({"sampling": {"temperature": 0.7}}), Config)
        True
        >>> parse_config({"sampling": {"temprature": 0.7}})
        Traceback (most recent call last):
        entropy_experiments.config.problems.ConfigError: ...
    """
    if isinstance(mapping, Config):
        return mapping
    if not isinstance(mapping, Mapping):
        raise ConfigError(source, [f"got a {type(mapping).__name__}, expected a dict of sections."])
    return validated(mapping, source=source, where={})


def load_config(path: str | Path | None = None) -> Config:
    """A configuration from a YAML file or a template.

    Args:
        path: A YAML file; a template's name where no such file exists; None: the quick start.

    Returns:
        The configuration, checked.

    Raises:
        ConfigError: If a key is unknown or a value cannot be used; with file, line and dotted key.

    Examples:
        >>> isinstance(load_config("test_deltaH1"), Config)
        True
    """
    source, text = read_text(DEFAULT_TEMPLATE if path is None else path)
    if source.partition(" ")[0] in TRAINING_TEMPLATES and not Path(path or "").exists():
        raise ConfigError(source, [f"is for training. Run it: entropy-probe train --config {path}"])
    mapping, lines = parse_text(text, source=source)
    return validated(mapping, source=source, where=lines)


def as_config(config: Config | Mapping[str, Any] | str | Path | None) -> Config:
    """A configuration from any of its forms: a value, a dict, a file or a template's name."""
    if isinstance(config, Config):
        return config
    return load_config(config) if isinstance(config, str | Path) else parse_config(config or {})


def template_names() -> tuple[str, ...]:
    folder = resources.files("entropy_experiments") / "configs"
    return tuple(sorted(file.name for file in folder.iterdir() if file.name.endswith(".yaml")))


def template_text(name: str) -> str:
    """The text of a template, comments and all."""
    wanted = name if name.endswith(".yaml") else f"{name}.yaml"
    if wanted not in template_names():
        raise ConfigError(
            "template", [f"got {name!r}, expected one of {', '.join(template_names())}."]
        )
    return (resources.files("entropy_experiments") / "configs" / wanted).read_text("utf-8")


def template(name: str = DEFAULT_TEMPLATE) -> dict[str, Any]:
    """A template as a plain dict, to change and hand to `parse_config` or OfflineEntropyProbe."""
    return parse_text(template_text(name), source=name)[0]


def config_yaml(config: Config) -> str:
    """Every key of a configuration as YAML that `load_config` reads back."""
    return plain_yaml(config.dump())


def plain_yaml(value: Mapping[str, Any]) -> str:
    """YAML that every reader understands alike.

    PyYAML writes 8.0e-07, which is a number in YAML 1.1 and 1.2; users' own scripts read our files
    with PyYAML, to which 8e-07 is text.
    """
    return yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=100)


HEADING = """
Every key, with its default. Copy what you need: all sections and all keys are optional.

Check a copy with `entropy-probe config check FILE`, run it with `entropy-probe run --config FILE`.
As it stands it probes the small policy shipped with the package. Files with the keys of the
earlier documents are read as well; `entropy-probe config migrate FILE` writes today's.

This file is written from the descriptions in entropy_experiments.config and tested against them.
"""


def documented_yaml() -> str:
    """Every key with its default and its description: the text of all_keys.yaml."""
    blocks = [_comment(HEADING, "")]
    for name, info in Config.model_fields.items():
        section = info.default
        blocks.append("\n".join([_comment(type(section).__doc__, ""), f"{name}:", *_keys(section)]))
    return "\n\n".join(blocks) + "\n"


def _keys(section: Section, indent: str = "  ") -> list[str]:
    lines = []
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        lines.append(_comment(info.description, indent))
        if isinstance(value, Section):
            lines += [f"{indent}{name}:", *_keys(value, indent + "  ")]
            continue
        plain = section.model_dump(mode="json", include={name})[name]
        flow = yaml.safe_dump(plain, default_flow_style=True, width=1000)
        lines.append(f"{indent}{name}: {flow.removesuffix('...' + chr(10)).strip()}")
    return lines


def _comment(text: str | None, indent: str) -> str:
    paragraphs = (text or "").strip().split("\n\n")
    mark = f"{indent}# "
    return f"\n{mark.rstrip()}\n".join(
        textwrap.fill(" ".join(p.split()), 100, initial_indent=mark, subsequent_indent=mark)
        for p in paragraphs
    )


def read_text(path: str | Path, *, offered: str | None = None) -> tuple[str, str]:
    """(name for messages, text). `offered`: what there is instead of a file that is not there."""
    file = expand_path(path, "--config")
    if file.is_dir():
        raise ConfigError(str(path), ["is a folder, expected a YAML file."])
    if file.exists():
        check_regular(file, most=LARGEST_FILE)
        try:
            return str(path), file.read_text("utf-8")
        except UnicodeDecodeError:
            raise ConfigError(str(path), ["is not text in UTF-8, expected YAML."]) from None
    pure = PurePath(path)
    name = pure.name if pure.suffix else f"{pure.name}.yaml"
    if pure.parent.as_posix() in TEMPLATE_FOLDERS and name in template_names():
        return f"{name} {TEMPLATE}", template_text(name)
    offered = offered or (
        f"Templates of the package, which need no folder: {', '.join(template_names())}."
    )
    raise FileNotFoundError(f"Configuration not found: {path}. {offered}")
