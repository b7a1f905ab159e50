"""From a file, a preset or a plain dict to a `TrainingConfig`, and back to YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from entropy_experiments.config.documents import BARE_NAMES, FIELDS
from entropy_experiments.config.keys import (
    MISSING,
    Alias,
    Resolved,
    copied,
    look,
    put,
    remove,
    shown,
    unify,
)
from entropy_experiments.config.model import known_fields, validated
from entropy_experiments.config.problems import DEEPEST, MOST, ConfigError, described, nearest
from entropy_experiments.config.reading import TRAINING_TEMPLATES, plain_yaml, read_text
from entropy_experiments.config.training import Probe, TrainingConfig
from entropy_experiments.config.yaml_dialect import parse_text, parse_value

PRESETS = {
    "tiny": "train_tiny.yaml",
    "smollm2-gsm8k": "train_smollm2_gsm8k.yaml",
    "qwen25-15b-lora": "train_qwen25_15b_lora.yaml",
}
DEFAULT_PRESET = "tiny"
OLD_PROBE = "simple_entropy_probe"
"""Document 001's section of the probe."""
TRAINING_ALIASES: tuple[Alias, ...] = tuple(
    Alias(
        spelling=spelling, canonical=canonical, nullable=True
    )  # null is a value, such as no limit
    for spelling, canonical in {
        "total_steps": "max_steps",
        "model_name_or_path": "model",
        "reward_funcs": "reward_functions",
        "lora.lora_alpha": "lora.alpha",
        "lora.lora_dropout": "lora.dropout",
        **{f"{OLD_PROBE}.{name}": f"probe.{name}" for name in Probe.model_fields},
    }.items()
)
"""Names that mean the same. Set to different values they are an error."""
TRAINING_RETIRED = {
    f"{OLD_PROBE}.debug": "what the probe finds is in entropy_probe.jsonl, with its reasons",
}


def load_training(path: str | Path | None = None) -> TrainingConfig:
    """A YAML file, or a template's name where no such file exists; without path, `tiny`."""
    offered = (
        f"Templates of a training, which need no folder: {', '.join(TRAINING_TEMPLATES)}. Or "
        f"--preset {', '.join(PRESETS)}."
    )
    source, text = read_text(PRESETS[DEFAULT_PRESET] if path is None else path, offered=offered)
    mapping, lines = parse_text(text, source=source)
    return _validated(mapping, source=source, where=lines)


def load_preset(name: str) -> TrainingConfig:
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.5)  # tyni
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            "--preset", [f"got {name!r}, expected one of {', '.join(PRESETS)}.{hint}"]
        )
    return load_training(PRESETS[name])


def parse_training(mapping: Mapping[str, Any], *, source: str = "config") -> TrainingConfig:
    """A plain dict, as full or as empty as you like."""
    if isinstance(mapping, TrainingConfig):
        return mapping
    if not isinstance(mapping, Mapping):
        raise ConfigError(source, [f"got a {type(mapping).__name__}, expected a dict of keys."])
    return _validated(mapping, source=source, where={})


def training_yaml(config: TrainingConfig) -> str:
    """Every key as YAML that `load_training` reads back."""
    return plain_yaml(config.dump())


def migrated_yaml(path: str | Path) -> tuple[str, tuple[str, ...]]:
    """A file of a run or of a training under the schema's keys.

    Returns:
        The YAML: what the file sets and no more, without its comments. And one line for each key
        that was left out since it has no effect.
    """
    source, text = read_text(path)
    mapping, lines = parse_text(text, source=source)
    if _is_training(mapping):
        training = _validated(mapping, source=source, where=lines)
        return plain_yaml(training.model_dump(mode="json", exclude_unset=True)), training.notes
    config = validated(mapping, source=source, where=lines)
    return plain_yaml(config.written), config.notes


def _is_training(mapping: Mapping[Any, Any]) -> bool:
    """Whether more keys are a training's than a run's; some, such as microbatch_size, are both."""
    own = {*_defaults(), *(alias.spelling.partition(".")[0] for alias in TRAINING_ALIASES)}
    run = {*known_fields(), *(key.partition(".")[0] for key in (*FIELDS, *BARE_NAMES))}
    return len(own & mapping.keys()) > len(run & mapping.keys())


def replaced(
    config: TrainingConfig, changes: Mapping[str, Any], *, where: str = "replaced"
) -> TrainingConfig:
    """A copy with other values at dotted keys."""
    mapping = config.dump()
    canonical = {alias.spelling: alias.canonical for alias in TRAINING_ALIASES}
    for key, value in changes.items():
        # Whatever it replaces is there under the canonical name, after reading.
        put(mapping, canonical.get(key, key), value)
    places = dict.fromkeys(changes, where)
    resolved = _validated(mapping, source=config.source, where=places)
    resolved._notes = config.notes
    return resolved


def with_overrides(config: TrainingConfig, overrides: Sequence[str]) -> TrainingConfig:
    """A copy with `key=value` applied; values are read as YAML."""
    changes: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.strip().split(".")) or key.count(".") >= DEEPEST:
            raise ConfigError("--set", [f"got {text!r}, expected key=value."])
        changes[key.strip()] = parse_value(value, source=f"--set {text}")
    return replaced(config, changes, where="--set")


def training_schema() -> dict[str, Any]:
    return TrainingConfig.model_json_schema()


@cache
def _defaults() -> dict[str, Any]:
    return TrainingConfig().model_dump(mode="json")


def known_training_fields() -> dict[str, Any]:
    """Every field with its default."""
    return copied(_defaults())


def _validated(
    mapping: Mapping[Any, Any], *, source: str, where: Mapping[str, str]
) -> TrainingConfig:
    fields = _defaults()
    odd = [key for key in mapping if not isinstance(key, str)]
    if odd:
        raise ConfigError(source, [f"key {odd[0]!r} is not text, expected names of settings."])
    resolved = Resolved(mapping=copied(mapping))
    wrong = _settled(resolved, fields)
    config, more = None, 0
    try:
        config = TrainingConfig.model_validate(resolved.mapping)
    except ValidationError as failure:
        some, more = described(failure, fields, resolved.origin)
        wrong += some
    if wrong or config is None:
        lines = dict.fromkeys(_line(*one, where) for one in wrong)
        raise ConfigError(source, list(lines), more=more)
    config._source, config._notes = source, tuple(resolved.notes)
    return config


def _settled(resolved: Resolved, fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Sections without keys, retired keys and other names, in place; what is wrong with them."""
    wrong: list[tuple[str, str]] = []
    for section in ("probe", "doctor", "trl", OLD_PROBE):
        if look(resolved.mapping, section) is None:  # all its keys are commented out
            resolved.mapping[section] = {}
    old = look(resolved.mapping, OLD_PROBE)
    if old is not MISSING and not isinstance(old, Mapping):
        wrong.append((OLD_PROBE, f"got {shown(old)}, expected a section: enabled: true below it."))
        remove(resolved.mapping, OLD_PROBE)
    for key, why in TRAINING_RETIRED.items():
        if look(resolved.mapping, key) is not MISSING:
            remove(resolved.mapping, key)
            resolved.notes.append(f"{key}: has no effect; {why}.")
    for canonical in dict.fromkeys(alias.canonical for alias in TRAINING_ALIASES):
        names = [alias for alias in TRAINING_ALIASES if alias.canonical == canonical]
        unify(resolved, canonical, names)
    for name in islice(resolved.mapping.get(OLD_PROBE) or {}, MOST):
        hint = nearest(f"probe.{name}", fields)
        wrong.append((f"{OLD_PROBE}.{name}", f"unknown key. {hint}"))
    resolved.mapping.pop(OLD_PROBE, None)
    return wrong + resolved.wrong


def _line(key: str, what: str, where: Mapping[str, str]) -> str:
    if not key:  # between keys: the message begins with one of them
        key, _, what = what.partition(" ")
    # Keys are flat here, and not sections.
    what = what.replace("Sections: ", "Keys: ")
    place = where.get(key) or where.get(key.partition("[")[0])
    return f"{place}: {key}: {what}" if place else f"{key}: {what}"
