"""State of the whole process that the user's code, such as a reward, may leave changed.

Every relative path of a run, every derivative and every message depends on it, so it is read
before that code is run, and restored afterwards. What counts:

    recursion    the recursion limit, if it is lower than before
    folder       the working directory
    streams      sys.stdout and sys.stderr, and the descriptors below them
    torch        grad mode, inference mode and autocast, if torch is loaded by then
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STREAMS = {"stdout": 1, "stderr": 2}
_KEPT: list[Any] = []
"""Guards of inference mode: one that is collected would set back what it was made to set."""


class ProcessState:
    """A snapshot; `restore` says in words what was changed since, and undoes it."""

    def __init__(self) -> None:
        self.folder = Path.cwd()
        self._recursion = sys.getrecursionlimit()
        self._usable = {name: _usable(name) for name in STREAMS}
        self._descriptors = {number: _duplicate(number) for number in STREAMS.values()}
        self._torch = {name: read() for name, (read, _) in _torch_modes().items()}

    def restore(self) -> list[str]:
        """What had changed, each as what the code did: "closed sys.stdout"."""
        limit = sys.getrecursionlimit()
        if lowered := limit < self._recursion:
            sys.setrecursionlimit(self._recursion)  # first: what follows calls deeper
        changes = [f"lowered the recursion limit to {limit}"] if lowered else []
        return [*changes, *self._restore_folder(), *self._restore_streams(), *self._restore_torch()]

    def _restore_folder(self) -> list[str]:
        if (after := _folder()) == self.folder:
            return []
        os.chdir(self.folder)
        return [f"changed the working directory to {after or 'a folder that is gone'}"]

    def _restore_streams(self) -> list[str]:
        changes = []
        for name, number in STREAMS.items():
            saved = self._descriptors[number]
            if saved is not None:
                if not _is_open(number):
                    os.dup2(saved, number)
                    changes.append(f"closed the descriptor {number} of {name}")
                os.close(saved)
            if self._usable[name] and not _usable(name):
                stream = open(number, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
                setattr(sys, name, stream)
                changes.append(f"closed sys.{name}")
        return changes

    def _restore_torch(self) -> list[str]:
        modes = _torch_modes()
        # What was loaded since had its defaults before.
        before = {name: self._torch.get(name, name == GRAD) for name in modes}
        changed = {n: mode for n, (read, _) in modes.items() if (mode := read()) != before[n]}
        if changed:
            for name, (read, write) in modes.items():
                if read() != before[name]:
                    write(before[name])
        return [f"left {name} {'on' if mode else 'off'}" for name, mode in changed.items()]


GRAD = "torch's grad mode"


def _torch_modes() -> dict[str, tuple[Callable[[], bool], Callable[[bool], object]]]:
    """Name: how a mode is read, and how it is set. Empty as long as nobody has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "inference_mode"):
        return {}

    def set_inference(mode: bool) -> None:
        guard = torch.inference_mode(mode)
        guard.__enter__()
        _KEPT.append(guard)

    modes: dict[str, tuple[Callable[[], bool], Callable[[bool], object]]] = {
        # First: to set it sets grad mode, too.
        "torch.inference_mode": (torch.is_inference_mode_enabled, set_inference),
        GRAD: (torch.is_grad_enabled, torch.set_grad_enabled),
    }
    for device in ("cpu", "cuda"):
        modes[f"torch.autocast({device!r})"] = (
            lambda device=device: torch.is_autocast_enabled(device),
            lambda mode, device=device: torch.set_autocast_enabled(device, mode),
        )
    return modes


def _folder() -> Path | None:
    """The working directory; None: it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _usable(name: str) -> bool:
    stream = getattr(sys, name)
    return stream is not None and not getattr(stream, "closed", False)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _duplicate(number: int) -> int | None:
    """Another descriptor of the same stream; None: it is closed."""
    return os.dup(number) if _is_open(number) else None
