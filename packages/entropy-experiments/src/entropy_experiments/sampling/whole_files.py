"""Files that appear whole or not at all. Without torch: what only writes text is quick.

Units of rollouts and stages of studies begin with the sha256 of what follows.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

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
