"""`Config`: one frozen value with a section for each part of a run.

Made by `parse_config` or `load_config`, which also read the documents' dialect
(`config.documents`); `Config(...)` alone does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import PrivateAttr, ValidationError, model_validator

from entropy_experiments.config import sections
from entropy_experiments.config.documents import (
    SECTIONS,
    as_documents,
    explained,
    known_keys,
    spellings,
    translate,
    translation,
)
from entropy_experiments.config.fields import Section
from entropy_experiments.config.keys import MISSING, copied, look, put, remove
from entropy_experiments.config.problems import DEEPEST, ConfigError, described, nearest
from entropy_experiments.config.yaml_dialect import parse_value

FORWARD_PER_MICROBATCH = 8
"""Passes without gradient keep no activations; this many times more sequences fit."""


TEMPLATE = "(template of the package)"
"""Ends the name of a source that is no file of the user's."""


class Setting(NamedTuple):
    """A key that was set."""

    value: Any
    place: str
    """The line of the file, the option or the call that set it."""
    asked: bool
    """Somebody chose this value: not a file that repeats the default, nor one in the documents'
    dialect, whose keys say what a run of their time had."""


class Config(Section):
    """A whole run. Every section and every key is optional.

    Make one with `load_config` or `parse_config`; the configuration reference has all keys.

    Examples:
        >>> config = parse_config({})
        >>> isinstance(config, Config)
        True
    """

    checkpoint: sections.Checkpoint = sections.Checkpoint()
    data: sections.Data = sections.Data()
    sampling: sections.Sampling = sections.Sampling()
    update: sections.Update = sections.Update()
    entropy: sections.Entropy = sections.Entropy()
    predict: sections.Predict = sections.Predict()
    measure: sections.Measure = sections.Measure()
    influence: sections.Influence = sections.Influence()
    memory: sections.Memory = sections.Memory()
    output: sections.Output = sections.Output()

    # What the user wrote; None for a Config made without `parse_config`.
    _given: dict[str, Any] | None = PrivateAttr(default=None)
    _source: str = PrivateAttr(default="config")
    _where: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(default=())
    _origin: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _baseline_by_token(self) -> Config:
        if self.predict.baseline and self.measure.weighting != "per_decision":
            raise ValueError(
                f"predict.baseline is true with measure.weighting {self.measure.weighting!r}, "
                "which has no terms per token to subtract it from. Set measure.weighting: "
                "per_decision, or predict.baseline: false."
            )
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each accepted key that means nothing."""
        return self._notes

    @property
    def translation(self) -> str | None:
        """One line on the documents' keys of the file, and what they are today."""
        return translation(self._origin)

    @property
    def written(self) -> dict[str, Any]:
        """What the file set, nested under the schema's keys: no defaults, no retired keys."""
        return copied(self.model_dump(mode="json", exclude_unset=True))

    @property
    def source(self) -> str:
        """Where it was read from, in words."""
        return self._source

    def setting(self, key: str) -> Setting | None:
        """What set a dotted key of the schema; None: nothing, or a template of the package."""
        spelling = self._origin.get(key, key)
        written = look(self._given or {}, spelling)
        value = look(self.dump(), key)
        if written is MISSING or written is None:
            return None
        place = self._where.get(spelling, self._source)
        if place != self._source and not place.startswith("line "):
            return Setting(value, place, asked=True)
        if self._source.endswith(TEMPLATE):
            return None
        asked = spelling == key and value != look(_defaults(), key)
        return Setting(value, place, asked=asked)

    @property
    def forward_batch_size(self) -> int:
        """Sequences per pass without gradient."""
        default = FORWARD_PER_MICROBATCH * self.memory.microbatch_size
        return self.memory.forward_batch_size or default

    @property
    def rollout_folder(self) -> Path:
        """Where finished rollouts are kept, so that an interrupted run can continue."""
        logs = Path(self.output.folder)
        return logs / "rollouts" if self.sampling.save is None else Path(self.sampling.save)

    def dump(self) -> dict[str, Any]:
        """Plain nested dict of every key; `parse_config` of it gives the same configuration."""
        return self.model_dump(mode="json")

    def documents(self) -> dict[str, Any]:
        """The same under the documents' keys: what resumable studies are identified by."""
        return as_documents(self.dump())

    def replaced(self, changes: Mapping[str, Any], *, where: str = "replaced") -> Config:
        """A copy with other values at dotted keys, of the schema or of the documents.

        A changed key also replaces what the file said under its other spellings.
        """
        recorded = self._given
        if recorded is None:
            recorded = self.model_dump(mode="json", exclude_unset=True)
        mapping, places = copied(recorded), dict(self._where)
        for key in changes:
            for twin in spellings(key) - set(changes):
                remove(mapping, twin)
            places[key] = where
        for key, value in changes.items():
            put(mapping, key, value)
            if look(mapping, key) is MISSING:
                raise ConfigError(where, [f"{key}: unknown key. {_hint(key)}"])
        return validated(mapping, source=self._source, where=places)

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
                "output.folder": str(out / "logs"),
                "sampling.save": str(out / "rollouts"),
                "output.results_file": str(out / "results.json"),
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
    resolved = translate(given, fields)
    wrong, more = list(resolved.wrong), resolved.more
    config = None
    try:
        config = Config.model_validate(resolved.mapping)
    except ValidationError as failure:
        some, others = described(failure, known_keys(fields), resolved.origin, listed=fields)
        wrong, more = wrong + some, more + others
    if wrong or config is None:
        lines = dict.fromkeys(_placed(key, what, where) for key, what in wrong)
        raise ConfigError(source, list(lines), more=more)
    config._given, config._source = copied(given), source
    config._where, config._notes = dict(where), tuple(resolved.notes)
    config._origin = dict(resolved.origin)
    return config


def _hint(key: str) -> str:
    return nearest(key, known_keys(_defaults()), listed=_defaults())


_SECTIONS = {*Config.model_fields, *SECTIONS}


def _placed(key: str, what: str, where: Mapping[str, str]) -> str:
    if not key:  # between sections: the message begins with one of its keys
        key, _, what = what.partition(" ")
    elif "." not in key and what.partition(".")[0] in _SECTIONS:  # inside a section, likewise
        place = where.get(what.partition(" ")[0])
        return f"{place}: {what}" if place else what
    place = where.get(key) or where.get(key.partition("[")[0])
    return f"{place}: {key}: {what}" if place else f"{key}: {what}"


def json_schema() -> dict[str, Any]:
    """JSON schema with every description; accepted keys that are no fields are `deprecated`."""
    schema = Config.model_json_schema()
    for key, what in explained():
        *parents, leaf = key.split(".")
        home = schema
        for part in parents:
            inner = home.get("properties", {}).get(part)
            if inner is None:
                inner = {
                    "type": "object",
                    "properties": {},
                    "deprecated": True,
                    "description": "A section of the earlier documents.",
                }
                home["properties"][part] = inner
            home = schema["$defs"][inner["$ref"].split("/")[-1]] if "$ref" in inner else inner
        if "properties" in home:
            home["properties"][leaf] = {"deprecated": True, "description": what}
    return schema
