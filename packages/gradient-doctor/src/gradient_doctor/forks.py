"""A forked child, such as a DataLoader's worker, inherits the doctor's hooks and modes.

What the child does is not part of the parent's training, and nobody would read its findings. So in
the child everything is put back before its own code runs.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

_active: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_forks(doctor: Any) -> None:
    """Have `doctor.leave()` called in every child that is forked from now on."""
    _active.add(doctor)


def forget_forks(doctor: Any) -> None:
    _active.discard(doctor)


def _in_child() -> None:
    for doctor in list(_active):
        doctor.leave()
    _active.clear()


if hasattr(os, "register_at_fork"):  # systems without fork have nothing to inherit
    os.register_at_fork(after_in_child=_in_child)
