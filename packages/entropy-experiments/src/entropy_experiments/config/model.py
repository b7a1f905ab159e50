"""`Config`: one frozen value with a section for each part of a run.

Made by `parse_config` or `load_config`, which also settle aliases; `Config(...)` alone does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, ValidationError, model_validator

from entropy_experiments.config import estimates, inputs, outputs
from entropy_experiments.config.aliases import (
    ALIASES,
    MISSING,
    copied,
    look,
    put,
    remove,
    resolve,
)
from entropy_experiments.config.fields import Section
from entropy_experiments.config.problems import (
    DEEPEST,
    ConfigError,
    described,
    explained,
    nearest,
)
from entropy_experiments.config.yaml_dialect import parse_value

FORWARD_PER_MICROBATCH = 8
"""Passes without gradient keep no activations; this many times more sequences fit."""


class Config(Section):
    """A whole run. Every section and every key is optional.

    Make one with `load_config` or `parse_config`; the configuration reference has all keys.

    Examples:
        >>> config = parse_config({})
        >>> isinstance(config, Config)
        True
    """

    checkpoint: inputs.Checkpoint = inputs.Checkpoint()
    batch_config: inputs.BatchConfig = inputs.BatchConfig()
    generation: inputs.Generation = inputs.Generation()
    update: inputs.Update = inputs.Update()
    reward: inputs.Reward = inputs.Reward()
    rollouts: inputs.RolloutFiles = inputs.RolloutFiles()
    probe_rework: estimates.ProbeRework = estimates.ProbeRework()
    importance: estimates.Importance = estimates.Importance()
    estimator: estimates.Estimator = estimates.Estimator()
    approx_delta_h: estimates.ApproxDeltaH = estimates.ApproxDeltaH()
    true_delta_h: estimates.TrueDeltaH = estimates.TrueDeltaH()
    memory_config: estimates.MemoryConfig = estimates.MemoryConfig()
    influence: estimates.Influence = estimates.Influence()
    experiment: estimates.Experiment = estimates.Experiment()
    precision: estimates.Precision = estimates.Precision()
    detailed_logging: outputs.DetailedLogging = outputs.DetailedLogging()
    output: outputs.Output = outputs.Output()

    # What the user wrote; None for a Config made without `parse_config`.
    _given: dict[str, Any] | None = PrivateAttr(default=None)
    _source: str = PrivateAttr(default="config")
    _where: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="after")
    def _baseline_by_token(self) -> Config:
        if self.approx_delta_h.baseline and self.importance.is_mode != "per_decision":
            raise ValueError(
                "approx_delta_h.baseline is true with importance.is_mode "
                f"{self.importance.is_mode!r}, which has no terms per token to subtract it from. "
                "Set importance.is_mode: per_decision, or approx_delta_h.baseline: false."
            )
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each accepted key that means nothing or is read as another."""
        return self._notes

    @property
    def source(self) -> str:
        """Where it was read from, in words."""
        return self._source

    @property
    def forward_batch_size(self) -> int:
        """Sequences per pass without gradient."""
        default = FORWARD_PER_MICROBATCH * self.memory_config.microbatch_size
        return self.generation.tf_batch_size or default

    @property
    def rollout_folder(self) -> Path:
        """Where finished rollouts are kept, so that an interrupted run can continue."""
        logs = Path(self.detailed_logging.output_directory)
        return logs / "rollouts" if self.rollouts.save is None else Path(self.rollouts.save)

    def dump(self) -> dict[str, Any]:
        """Plain nested dict of every key; `parse_config` of it gives the same configuration."""
        return self.model_dump(mode="json")

    def replaced(self, changes: Mapping[str, Any], *, where: str = "replaced") -> Config:
        """A copy with other values at dotted keys.

        A changed key also replaces what the file said under its other spellings.
        """
        recorded = self._given
        if recorded is None:
            recorded = self.model_dump(mode="json", exclude_unset=True)
        given, places = copied(recorded), dict(self._where)
        for key in changes:
            for twin in _twins(key) - set(changes):
                remove(given, twin)
            places[key] = where
        for key, value in changes.items():
            put(given, key, value)
            if look(given, key) is MISSING:
                raise ConfigError(where, [f"{key}: unknown key. {nearest(key, _defaults())}"])
        return validated(given, source=self._source, where=places)

    def with_overrides(self, overrides: Sequence[str]) -> Config:
        """A copy with `section.key=value` applied; values are read as YAML."""
        changes: dict[str, Any] = {}
        for text in overrides:
            key, equals, value = text.partition("=")
            if not equals or not all(key.strip().split(".")) or not 0 < key.count(".") < DEEPEST:
                raise ConfigError("--set", [f"got {text!r}, expected section.key=value."])
            changes[key.strip()] = parse_value(value, source=f"--set {text}")
        return self.replaced(changes, where="--set")

    def under(self, out: str | Path) -> Config:
        """A copy that writes everything below one folder: logs, rollouts, results.json."""
        out = Path(out)
        return self.replaced(
            {
                "detailed_logging.output_directory": str(out / "logs"),
                "rollouts.save": str(out / "rollouts"),
                "output.results_path": str(out / "results.json"),
            },
            where="--out",
        )


@cache
def _defaults() -> dict[str, Any]:
    return Config().model_dump(mode="json")


def known_fields() -> dict[str, Any]:
    """Every field with its default, nested by section."""
    return copied(_defaults())


def validated(given: Mapping[Any, Any], *, source: str, where: Mapping[str, str]) -> Config:
    """`where` says, for dotted keys, the line of the file or the option they come from."""
    fields = _defaults()
    odd = [key for key in given if not isinstance(key, str)]
    if odd:
        raise ConfigError(source, [f"key {odd[0]!r} is not text. Sections: {', '.join(fields)}."])
    found = resolve(given, fields)
    wrong = list(found.conflicts)
    config, more = None, 0
    try:
        config = Config.model_validate(found.mapping)
    except ValidationError as failure:
        some, more = described(failure, fields, found.origin)
        wrong += some
    if wrong or config is None:
        lines = dict.fromkeys(_placed(key, what, where) for key, what in wrong)
        raise ConfigError(source, list(lines), more=more)
    config._given, config._source = copied(given), source
    config._where, config._notes = dict(where), tuple(found.notes)
    return config


def _placed(key: str, what: str, where: Mapping[str, str]) -> str:
    if not key:  # between sections: the message begins with one of its keys
        key, _, what = what.partition(" ")
    place = where.get(key) or where.get(key.partition("[")[0])
    return f"{place}: {key}: {what}" if place else f"{key}: {what}"


def _twins(key: str) -> set[str]:
    """Other spellings of a key."""
    canonical = next((a.canonical for a in ALIASES if a.spelling == key), key)
    names = {canonical, *(a.spelling for a in ALIASES if a.canonical == canonical)}
    return names - {key}


def json_schema() -> dict[str, Any]:
    """JSON schema with every description; accepted keys that are no fields are `deprecated`."""
    schema = Config.model_json_schema()
    for key, what in explained(_defaults()).items():
        *parents, leaf = key.split(".")
        home = schema
        for part in parents:
            inner = home.get("properties", {}).get(part)
            if inner is None:
                inner = {"type": "object", "properties": {}, "deprecated": True}
                home["properties"][part] = inner
            home = schema["$defs"][inner["$ref"].split("/")[-1]] if "$ref" in inner else inner
        if "properties" in home:
            home["properties"][leaf] = {"deprecated": True, "description": what}
    return schema
