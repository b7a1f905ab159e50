"""Attributes replaced for a while, and put back in reverse order whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set `owner.name` to `make(original)`; the original is the raw attribute of the owner."""
        raw = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name) if raw is _ABSENT else raw
        setattr(owner, name, make(original))
        self._undo.append((owner, name, raw))

    def restore(self) -> None:
        while self._undo:
            owner, name, raw = self._undo.pop()
            if raw is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, raw)
