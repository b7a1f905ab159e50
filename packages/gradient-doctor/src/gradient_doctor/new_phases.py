"""Does another part of training begin? Then its first steps are traced, as a script's own are.

Three signs of one, after the first traced steps: an optimizer that steps for the first time, a
model that gets a new part, and a backward on a way that none has taken before (a second loop, the
same helper called from another line, a loss that joins). Looks are few: folds, tasks and models
that grow may begin a new phase in every step.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from torch import nn

from gradient_doctor.session import Session
from gradient_doctor.sites import is_user_code

_EXAMINED = 3  # traced steps of each: as many as a script's first ones
_BACKWARDS = 6  # the same, where many belong to one step
_LOOKS_AT_OPTIMIZERS = 9  # folds may make a new one each
_LOOKS_AT_WAYS = 9
_LOOKS_AT_PARTS = 4  # a model may grow in every step
_FRAMES = 64  # from a backward outwards


class NewPhases:
    """Asks the session for a closer look at the steps that follow."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._left_for_optimizers = _LOOKS_AT_OPTIMIZERS
        self._left_for_ways = _LOOKS_AT_WAYS
        self._left_for_parts = _LOOKS_AT_PARTS
        # optimizers -> their steps that were traced
        self._examined: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # ways of backwards -> traced steps with one, and traced backwards
        self._ways: dict[tuple[Any, ...], tuple[set[int], int]] = {}

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped; `examined` in a row, unless the script's first steps do."""
        session = self.session
        examined = self._examined.get(optimizer, 0)
        if session.record.traced:
            examined = self._examined[optimizer] = examined + 1
            if session.age < session.trace_steps:
                return
        if self._left_for_optimizers and examined < _EXAMINED:
            self._left_for_optimizers -= not session.look_again
            session.look_again = True

    def went_back(self) -> None:
        """A backward of the user's: the lines of all callers are its way."""
        session = self.session
        if not session.record.traced and not self._left_for_ways:
            return
        way = _way()
        steps, backwards = self._ways.get(way, (set(), 0))
        if session.record.traced:
            steps.add(session.step)
            backwards += 1
            self._ways[way] = steps, backwards
            if session.age < session.trace_steps:
                return
        few = len(steps) < _EXAMINED and backwards < _BACKWARDS
        if self._left_for_ways and few:
            self._left_for_ways -= not session.look_again
            session.look_again = True

    def grew(self, parent: nn.Module) -> None:
        """A model that is trained already gets a part: who will train that?"""
        session = self.session
        if not session.age or not self._left_for_parts:
            return
        top = session.registry.top_of(parent)
        if any(top is root for root in session.registry.roots.values()):
            self._left_for_parts -= not session.look_again
            session.look_again = True
            session.add_event("new_part", parent=weakref.ref(parent))


def _way() -> tuple[Any, ...]:
    """The user's lines that are running."""
    way: list[int] = []
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            break
        if is_user_code(frame.f_code):
            way += (id(frame.f_code), frame.f_lineno)
        frame = frame.f_back
    return tuple(way)
