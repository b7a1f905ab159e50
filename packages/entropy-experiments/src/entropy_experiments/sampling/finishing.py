"""On SIGTERM the current unit of rollouts is finished and stored, and then the process ends.

When one rank is lost, torchrun ends the others with SIGTERM, and with SIGKILL 30 s later. Each of
them may be in the middle of a unit; what one lost rank costs should be one unit.

    with finishing_units():          # once, around the command
        ...
        with current_unit():         # around each unit: draw it, store it
            store.put(key, draw())

The handler is there only during a unit. Python runs handlers between bytecodes, so a rank that
waits inside an exchange for the lost one would not come to it: there, and everywhere else,
SIGTERM does what it did before, which is to end the process at once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

TERMINATED = 128 + signal.SIGTERM
"""The exit code that shells give a process that SIGTERM has ended."""


class Terminated(SystemExit):
    """SIGTERM came during a unit; the unit is stored by now."""


_FINISHING: ContextVar[bool] = ContextVar("finishing", default=False)


@contextmanager
def finishing_units() -> Iterator[None]:
    """Inside, SIGTERM lets the current unit be finished. Main thread only, as all handlers."""
    token = _FINISHING.set(True)
    try:
        yield
    finally:
        _FINISHING.reset(token)


@contextmanager
def current_unit() -> Iterator[None]:
    """Around the drawing and the storing of one unit. Raises `Terminated` at its end, if asked to.

    A second SIGTERM changes nothing: a scheduler signals the ranks and torchrun, which passes it
    on to them.
    """
    if not _FINISHING.get():
        yield
        return
    terminated = False

    def note(*_: Any) -> None:
        nonlocal terminated
        terminated = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: not set from Python
    if terminated:
        raise Terminated(TERMINATED)
