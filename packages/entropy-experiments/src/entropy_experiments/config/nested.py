"""Values at dotted keys of nested mappings, which is how settings are named: `data.split`."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
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
