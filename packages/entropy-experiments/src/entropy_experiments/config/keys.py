"""Dotted keys of nested settings, such as `data.split`, and their several spellings.

Several names of one setting are read as its canonical key, and they must agree: set to different
values they are an error. null is *not set* and agrees with anything.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class _Missing:
    def __repr__(self) -> str:
        return "(missing)"


MISSING = _Missing()


def copied(value: Any) -> Any:
    """Nested mappings as plain dicts of their own; everything else is shared."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return value


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


def every_key(fields: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    """Dotted keys of all leaves."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from every_key(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def shown(value: Any) -> str:
    """A value for a message: short, however large or deep it is."""
    short = reprlib.Repr()
    short.maxstring, short.maxother, short.maxlevel = 60, 60, 2
    return short.repr(value)


@dataclass(frozen=True, kw_only=True, eq=False)
class Alias:
    """`spelling` is another name of `canonical`; `values` translates its values, if they differ."""

    spelling: str
    canonical: str
    values: Mapping[bool, Any] | None = None
    """For a name that is true or false where the canonical key is a word."""
    nullable: bool = False
    """null is a value to be judged by the canonical key's type. Elsewhere null says nothing."""

    def read(self, value: Any) -> Any:
        """The canonical value. What cannot be translated stays as it is: `misfit` refuses it."""
        if self.values is None or not isinstance(value, bool):
            return value
        return self.values[value]

    def misfit(self, value: Any) -> str | None:
        """What is wrong with a value that cannot be translated."""
        if self.values is None or isinstance(value, bool):
            return None
        return f"got {shown(value)}, expected true or false."

    def write(self, value: Any) -> Any:
        """The value under this spelling."""
        if self.values is None:
            return value
        return next((own for own, canonical in self.values.items() if canonical == value), None)


@dataclass(kw_only=True)
class Resolved:
    """A mapping in canonical spelling, and how it came about."""

    mapping: dict[str, Any]
    origin: dict[str, str] = field(default_factory=dict)
    """Canonical key: the key the user wrote, where it is another."""
    notes: list[str] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """(key, what is wrong)."""
    more: int = 0
    """Further problems, which are counted only."""


def unify(resolved: Resolved, canonical: str, aliases: Sequence[Alias]) -> None:
    """All spellings of one setting into its canonical key; disagreement is noted as wrong.

    `aliases`: those of this key.
    """
    names = [Alias(spelling=canonical, canonical=canonical, nullable=True), *aliases]
    written = {
        name: value
        for name in names
        if (value := look(resolved.mapping, name.spelling)) is not MISSING
    }
    if not written:
        return
    for name in written:
        remove(resolved.mapping, name.spelling)
    values = {name: name.read(value) for name, value in written.items() if value is not None}
    if not values:
        judged = next((name for name in written if name.nullable), None)
        if judged is not None:
            _put(resolved, judged, None)
        return
    for name in values:
        if problem := name.misfit(written[name]):
            resolved.wrong.append((name.spelling, problem))
            return
    (first, value), *others = values.items()
    for name, other in others:
        if isinstance(other, bool) != isinstance(value, bool) or other != value:
            resolved.wrong.append(
                (
                    name.spelling,
                    f"got {shown(written[name])}, but {first.spelling} is "
                    f"{shown(written[first])}, and they are one setting. Keep {canonical} alone.",
                )
            )
    _put(resolved, first, value)


def _put(resolved: Resolved, name: Alias, value: Any) -> None:
    put(resolved.mapping, name.canonical, value)
    if name.spelling != name.canonical:
        resolved.origin[name.canonical] = name.spelling
