"""The one table of names that mean the same, and of names that mean nothing any more.

Documents 001 to 004 spell several settings twice. Each spelling below is read as its canonical key;
set to different values they are an error. After reading, every spelling that is itself a field
holds the canonical value, so code may read either. null is *not given* and agrees with anything.

Sizes with gradient (microbatch_size) and without (tf_batch_size) are two settings: document 004
advises raising the second, which costs little memory, and document 002 lowering the first.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UNIT = {True: "per_token", False: "per_sequence"}


@dataclass(frozen=True, kw_only=True)
class Alias:
    """`spelling` is another name of `canonical`; `values` translates its values, if they differ."""

    spelling: str
    canonical: str
    values: Mapping[Any, Any] | None = None

    def read(self, value: Any) -> Any:
        """The canonical value. What cannot be translated stays as it is, to be refused later."""
        if self.values is None or not isinstance(value, bool):
            return value
        return self.values[value]

    def write(self, value: Any) -> Any:
        if self.values is None:
            return value
        return next((own for own, canonical in self.values.items() if canonical == value), None)


def _same(canonical: str, *spellings: str, values: Mapping[Any, Any] | None = None) -> list[Alias]:
    return [Alias(spelling=s, canonical=canonical, values=values) for s in spellings]


ALIASES: tuple[Alias, ...] = (
    *_same("importance.enabled", "true_delta_h.enabled"),
    *_same("importance.is_mode", "true_delta_h.is_mode"),
    *_same("importance.clip_c", "true_delta_h.clip_c"),
    *_same(
        "approx_delta_h.normalize",
        "importance.report_per_token",
        "true_delta_h.report_per_token",
        values=UNIT,
    ),
    *_same(
        "memory_config.microbatch_size",
        "approx_delta_h.microbatch_size",
        "true_delta_h.microbatch_size",
        "influence.microbatch_size",
        "microbatch_size",
    ),
    *_same("generation.tf_batch_size", "true_delta_h.tf_batch_size", "tf_micro_batch"),
    *_same("generation.gen_batch_size", "batch_config.rollout_batch_size", "rollout_batch_size"),
    *_same("estimator.eta_list", "experiment.eta_list"),
    *_same("checkpoint.dtype", "precision.runtime_dtype"),
)

_WEIGHTS = "the update's token weights are update.loss, the entropy's unit approx_delta_h.normalize"
_STEP = (
    "the step is rebuilt in the parameters' precision, and the verdict notes it where training's "
    "(update.amp_dtype) was another"
)
_SUMS = "sums over ranks are always exact, there is nothing to choose"
_TRAINING = "training has a configuration of its own: entropy-probe train --config"
RETIRED: dict[str, str] = {
    "probe_rework.weighting_mode": _WEIGHTS,
    "probe_rework.mb_size_prompts": "passes count sequences: memory_config.microbatch_size",
    "probe_rework.buffers_dtype": "sums are kept in float64",
    "probe_rework.compute_conditional_variance": "intervals are always by prompt",
    "probe_rework.conditional_variance_batch_size": "intervals are always by prompt",
    "probe_rework.compute_vx_vy_variance": "intervals are always by prompt",
    "probe_rework.ddp_allreduce": _SUMS,
    "memory_config.amp": _STEP,
    "memory_config.dtype": "the weights' precision is checkpoint.dtype",
    "generation.rb_requires_grad": "gradients are asked for where they are needed",
    "precision.update_vector": _STEP,
    "precision.entropy_dtype": "logits are at least float32, sums over tokens always float64",
    "approx_delta_h.baseline.kind": "there is one baseline: approx_delta_h.baseline true or false",
    "true_delta_h.measure": "weights follow the law that was sampled: generation.top_p",
    "output.log_level": "the screen is --quiet, the log's detail is detailed_logging.level",
    "simple_entropy_probe.debug": "the log's detail is detailed_logging.level",
    "simple_entropy_probe.enabled": _TRAINING,
    "total_steps": _TRAINING,
    "buffer_size": _TRAINING,
    "training": _TRAINING,
    "distributed": _SUMS,
}


@dataclass(kw_only=True)
class Resolved:
    """A mapping in canonical spelling, and how it came about."""

    mapping: dict[str, Any]
    origin: dict[str, str] = field(default_factory=dict)
    """For keys that were filled: the key the user wrote."""
    notes: list[str] = field(default_factory=list)
    conflicts: list[tuple[str, str]] = field(default_factory=list)
    """(key, what is wrong)."""


def copied(value: Any) -> Any:
    """Nested mappings as plain dicts of their own; everything else is shared."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return value


def resolve(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Resolved:
    """Retired keys out, aliases to their canonical key. `defaults` are all fields of the model."""
    found = Resolved(mapping=copied(given))
    for section in [key for key, value in found.mapping.items() if value is None]:
        found.mapping[section] = {}  # a section whose keys are all commented out
    for key, why in RETIRED.items():
        if look(found.mapping, key) is not MISSING:
            remove(found.mapping, key)
            found.notes.append(f"{key}: has no effect; {why}.")
    for canonical in dict.fromkeys(alias.canonical for alias in ALIASES):
        unify(found, canonical, defaults)
    return found


def unify(
    found: Resolved,
    canonical: str,
    defaults: Mapping[str, Any],
    *,
    aliases: Sequence[Alias] = ALIASES,
) -> None:
    """All spellings of one setting into one; conflicts are kept for the message."""
    names = [Alias(spelling=canonical, canonical=canonical)]
    names += [alias for alias in aliases if alias.canonical == canonical]
    written = {name.spelling: look(found.mapping, name.spelling) for name in names}
    given = [name for name in names if written[name.spelling] not in (MISSING, None)]
    values = [name.read(written[name.spelling]) for name in given]
    for name, value in zip(given[1:], values[1:], strict=True):
        if isinstance(value, bool) != isinstance(values[0], bool) or value != values[0]:
            first = given[0].spelling
            found.conflicts.append(
                (
                    name.spelling,
                    f"got {shown(written[name.spelling])}, but {first} is "
                    f"{shown(written[first])}, and they are one setting. Keep {canonical} alone.",
                )
            )
    if given and given[0].spelling != canonical:
        found.origin[canonical] = given[0].spelling
        found.notes.append(f"{given[0].spelling}: read as {canonical}.")
    value = values[0] if values else look(defaults, canonical)
    for name in names:
        key = name.spelling
        if look(defaults, key) is MISSING:
            remove(found.mapping, key)
        elif given and key not in {g.spelling for g in given}:
            put(found.mapping, key, name.write(value))
            found.origin[key] = given[0].spelling
        elif not given and key != canonical:
            put(found.mapping, key, name.write(value))


class _Missing:
    def __repr__(self) -> str:
        return "(missing)"


MISSING = _Missing()


def look(mapping: Any, key: str) -> Any:
    """The value at a dotted key, or MISSING."""
    for part in key.split("."):
        if not isinstance(mapping, Mapping) or part not in mapping:
            return MISSING
        mapping = mapping[part]
    return mapping


def put(mapping: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, unless a parent is no mapping: that is refused elsewhere."""
    *parents, last = key.split(".")
    for part in parents:
        if mapping.get(part) is None:
            mapping[part] = {}
        mapping = mapping[part]
        if not isinstance(mapping, dict):
            return
    mapping[last] = value


def remove(mapping: dict[str, Any], key: str) -> None:
    """Delete a dotted key, and the parents it leaves empty."""
    *parents, last = key.split(".")
    inside = look(mapping, ".".join(parents)) if parents else mapping
    if isinstance(inside, dict) and last in inside:
        del inside[last]
        if parents and not inside:
            remove(mapping, ".".join(parents))


def shown(value: Any) -> str:
    """A value for a message: short, however large or deep it is."""
    short = reprlib.Repr()
    short.maxstring, short.maxother, short.maxlevel = 60, 60, 2
    return short.repr(value)
