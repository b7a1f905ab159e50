"""Attributes replaced for a while, and put back in reverse order whatever happens.

What somebody else has replaced in the meantime is theirs, and stays: their own end, or a patch of
theirs that was taken off while ours was on. A wrapper of ours that remains under theirs must pass
every call on once it is `over`; see guards.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()
_buried: list[tuple[Any, Any]] = []  # wrappers of ours under somebody else's, and what they replace


class Patches:
    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []

    @property
    def active(self) -> bool:
        return bool(self._undo)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set `owner.name` to `make(original)`; the original is the raw attribute of the owner."""
        raw = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name) if raw is _ABSENT else raw
        ours = make(original)
        self._undo.append((owner, name, raw, ours))  # first: an interruption may come in between
        setattr(owner, name, ours)

    def restore(self) -> None:
        while self._undo:
            owner, name, raw, ours = self._undo[-1]
            if vars(owner).get(name, _ABSENT) is ours:
                raw = _uncovered(raw)
                if raw is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, raw)
            elif vars(owner).get(name, _ABSENT) is not raw:
                _buried.append((ours, raw))
            self._undo.pop()


def _uncovered(raw: Any) -> Any:
    """What is under a wrapper of ours that was left because somebody had covered it."""
    for entry in _buried:
        if entry[0] is raw:
            _buried.remove(entry)
            return _uncovered(entry[1])
    return raw
