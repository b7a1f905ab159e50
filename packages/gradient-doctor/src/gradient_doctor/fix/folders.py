"""A trial runs in a copy of the folder that the script is started in, and of its own folder.

So both versions begin with the same files, and what they write is thrown away with the copy. Files
that a script names by an absolute path outside of these folders are the real ones.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

LIMIT_BYTES = 500 * 2**20
LIMIT_FILES = 20_000
LINKED_BYTES = 2**20  # with --link, files above this size are not copied
_SKIPPED = {".git", ".hg", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache"}


class TooLargeError(ValueError):
    """The folder cannot be copied for a trial."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """Real folders and their copies."""

    pairs: tuple[tuple[str, str], ...]

    def there(self, path: str) -> str:
        """The copy of a path; the path itself if it is outside."""
        return _translated(path, self.pairs)

    def back(self, path: str) -> str:
        """The real path of one in a copy."""
        return _translated(path, tuple((b, a) for a, b in self.pairs))


def _translated(path: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        if path == old or path.startswith(old + os.sep):
            return new + path[len(old) :]
    return path


def roots(script: str | None) -> tuple[str, ...]:
    """The working folder and the script's, without one that lies in the other."""
    folders = {os.path.realpath(os.getcwd())}
    if script is not None:
        folders.add(os.path.dirname(os.path.realpath(script)))
    return tuple(
        sorted(f for f in folders if not any(f != g and f.startswith(g + os.sep) for g in folders))
    )


def check_size(folders: tuple[str, ...], *, link: bool) -> None:
    """Refuse what takes too long to copy, before anything runs."""
    size = count = 0
    for folder in folders:
        for path in _files(folder):
            count += 1
            if path.is_symlink() and not link:
                _refuse_outside(path, folders)
            length = path.lstat().st_size
            size += 0 if link and length > LINKED_BYTES else length
            if size > LIMIT_BYTES or count > LIMIT_FILES:
                raise TooLargeError(
                    f"{folder} holds more than {LIMIT_BYTES >> 20} MiB or {LIMIT_FILES:,} files, "
                    "and each trial runs in a copy of it. Start from a smaller folder, or pass "
                    "--link: files above 1 MiB are then linked instead of copied, and a script "
                    "that writes to one of them changes it"
                )


def _refuse_outside(path: Path, folders: tuple[str, ...]) -> None:
    real = os.path.realpath(path)
    if not any(real == folder or real.startswith(folder + os.sep) for folder in folders):
        raise TooLargeError(
            f"{path} leads to {real}, outside of what is copied for a trial: a script that writes "
            "there changes it. Remove the link, or pass --link to accept that"
        )


def copy(
    folders: tuple[str, ...], into: Path, changed: Mapping[str, bytes], *, link: bool
) -> Copied:
    """Copies under `into`, with these files changed."""
    base = os.path.realpath(into)
    pairs = tuple((folder, os.path.join(base, f"{n}")) for n, folder in enumerate(folders))
    copied = Copied(pairs=pairs)
    for real, there in pairs:
        os.makedirs(there)
        for path in _files(real):
            target = Path(there, path.relative_to(real))
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():  # what it leads to has a copy, too, unless it lies outside
                target.symlink_to(copied.there(os.path.realpath(path)))
            elif link and path.lstat().st_size > LINKED_BYTES:
                target.symlink_to(path.resolve())
            else:
                shutil.copy2(path, target)
    for path, content in changed.items():
        Path(copied.there(path)).write_bytes(content)
    return copied


def _files(folder: str) -> Iterator[Path]:
    for at, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if name not in _SKIPPED and not os.path.exists(os.path.join(at, name, "pyvenv.cfg"))
        ]
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        for name in [*names, *links]:
            path = Path(at, name)
            if path.is_file() or path.is_dir():  # no sockets, pipes or dangling links
                yield path
