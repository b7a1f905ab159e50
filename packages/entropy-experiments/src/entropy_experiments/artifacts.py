"""What is written: files that appear whole or not at all, their hashes, and places tried first.

- Whole: a file is written under another name, flushed to disk and renamed.
- Hashed: units of rollouts and stages of studies begin with the sha256 of what follows.
- Keys: `digest_of` names a result by everything that determines it, so that it is found again.
- Tried: an hour of computing that ends in "Permission denied" is an hour lost, so every place that
  a command will write to is tried before.

Without torch: what only writes text is quick, and a wrong path is refused at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from entropy_experiments.input_errors import InputError

DIGITS = 64
_PARTIAL = re.compile(r"\..+\.(\d+)\.partial")


def write_whole(path: Path, data: bytes) -> None:
    """The file appears complete or not at all, also after a power cut."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} cannot be written: its folder is gone, which was there when the run began. "
            "Was it deleted or moved meanwhile? Run the same command again."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def write_changed(path: Path, data: bytes) -> None:
    """The same, where the file does not have these bytes already; its folder is made."""
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)


def is_partial(name: str) -> bool:
    """Of a file that somebody is writing, or was."""
    return _PARTIAL.fullmatch(name) is not None


def sweep_partials(folder: Path) -> None:
    """Delete what a killed process was writing: nobody will finish it."""
    for path in folder.rglob(".*.partial"):
        match = _PARTIAL.fullmatch(path.name)
        if match and not _alive(int(match[1])):
            path.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def hashed(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + body


def hashed_body(path: Path, data: bytes) -> bytes:
    """What `hashed` was given, if it is still that; `data` are the bytes of `path`."""
    digest, body = data[:DIGITS], data[DIGITS:]
    if digest != hashlib.sha256(body).hexdigest().encode():
        raise ValueError(
            f"{path} is damaged: its contents do not have the hash it begins with. Delete it and "
            "run again: what was in it is then made anew, with the same result."
        )
    return body


def sha256(path: Path) -> str:
    """Of a file's bytes, however large it is."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(*parts: Any) -> str:
    """sha256 of JSON values, the same for the same values whatever their order in mappings."""
    said = json.dumps(parts, sort_keys=True, allow_nan=False, default=_plain)
    return hashlib.sha256(said.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, set, frozenset)):
        return sorted(value) if isinstance(value, (set, frozenset)) else list(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be part of a key; expected JSON values.")


def try_folder(folder: str | Path) -> None:
    """Raise OSError or InputError, with the path, if nothing can be written below `folder`."""
    folder = Path(folder).expanduser()
    made: list[Path] = []
    try:
        for place in (*reversed(folder.parents), folder):
            if not place.exists():
                place.mkdir()
                made.append(place)
        if not folder.is_dir():
            raise InputError(
                f"{folder} is a file; expected a folder to write into. Choose another place."
            )
        trial = folder / f".{os.getpid()}.trial"
        try:
            with open(trial, "wb") as file:
                file.write(b"trial")
        finally:
            trial.unlink(missing_ok=True)
    finally:
        for place in reversed(made):
            place.rmdir()


def try_file(path: str | Path) -> None:
    """The same of the folder that a file is for."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise IsADirectoryError(21, os.strerror(21), str(path))
    try_folder(path.parent)


def try_outputs(folders: Iterable[str | Path | None], files: Iterable[str | Path | None]) -> None:
    """All of them; None: nothing is written there."""
    for folder in folders:
        if folder is not None:
            try_folder(folder)
    for path in files:
        if path is not None:
            try_file(path)
