"""Files are replaced all together or not at all.

First every new content is written beside its file and synced, and every old one is kept as
NAME.bak. Then they are renamed into place one after the other. If one cannot be, the backups are
renamed back: what a reader finds is the state of before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


class ChangedError(Exception):
    """A file is no longer what was read; nothing was written."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A file's content as it was read, and as it becomes."""

    path: str
    old: bytes
    new: bytes


@dataclass
class _Staged:
    change: Change
    made: dict[str, str] = field(default_factory=dict)  # the files beside it: "new", "backup"

    def prepare(self) -> None:
        path, mode = self.change.path, os.stat(self.change.path).st_mode & 0o7777
        handle, self.made["new"] = tempfile.mkstemp(
            dir=os.path.dirname(path) or ".", prefix=".gradient-doctor."
        )
        _fill(handle, self.made["new"], self.change.new, mode)
        name = _free(f"{path}.bak")
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self.made["backup"] = name
        _fill(handle, name, self.change.old, mode)

    def put_in_place(self) -> None:
        if Path(self.change.path).read_bytes() != self.change.old:
            raise ChangedError(self.change.path)
        os.replace(self.made["new"], self.change.path)

    def undo(self) -> None:
        new, backup = self.made.get("new"), self.made.get("backup")
        if new is not None and backup is not None and not os.path.lexists(new):
            os.replace(backup, self.change.path)  # it was in place already
        for name in (new, backup):
            if name is not None and os.path.lexists(name):
                os.unlink(name)


def replace_all(changes: Iterable[Change]) -> list[tuple[str, str]]:
    """Gives each path with the name of its backup; on any error all files are as before."""
    staged = [_Staged(change) for change in changes]
    try:
        for one in staged:
            one.prepare()
        for one in staged:
            one.put_in_place()
        for folder in {os.path.dirname(one.change.path) or "." for one in staged}:
            _sync(folder)
    except BaseException:
        for one in staged:
            one.undo()
        raise
    return [(one.change.path, one.made["backup"]) for one in staged]


def _fill(handle: int, name: str, content: bytes, mode: int) -> None:
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.chmod(name, mode)
        os.fsync(file.fileno())


def _free(name: str) -> str:
    number = 0
    while os.path.lexists(f"{name}{number or ''}"):
        number += 1
    return f"{name}{number or ''}"


def _sync(folder: str) -> None:
    """The renames themselves outlast a loss of power."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # a system that does not open folders
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
