"""The store: files that appear whole or not at all, hashes, manifests, work that is found again.

- Whole: a file is written under another name, flushed to disk and renamed.
- Manifest: a folder's files are written first, then its manifest with their hashes. A folder with
  a manifest is complete; a file that differs from it is not read.
- Hashed: a finished piece of work (a unit of rollouts, a stage of a study) is one file, which
  begins with the sha256 of what follows (`HashedFiles`).
- Keys: `digest_of` names a result by everything that determines it, so that a command which is run
  again finds what it has finished.
- Tried: an hour of computing that ends in "Permission denied" is an hour lost, so every place that
  a command will write to is tried before.

Without torch: what only writes text is quick, and a wrong path is refused at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

from entropy_experiments.input_errors import InputError

MANIFEST = "manifest.json"
DIGITS = 64
_PARTIAL = re.compile(r"\..+\.(\d+)\.partial")


@contextmanager
def named_os_errors(place: str | Path) -> Iterator[None]:
    """An OSError of a write, which has no path ("No space left on device"), gets this one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(place)
        raise


def refuse_special_file(path: Path) -> None:
    """Refuse an output that is a device, a pipe or a socket: the rename would replace it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(
            f"{path} is a device, a pipe or a socket; expected a regular file, or a name that is "
            "free. Choose another place."
        )


def write_whole(path: Path, data: bytes) -> None:
    """The file appears complete or not at all, also after a power cut."""
    refuse_special_file(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with named_os_errors(path), open(partial, "wb") as file:
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


def json_bytes(value: object, *, indent: int = 1) -> bytes:
    """A JSON file's content; NaN and infinity, which JSON has not, are a ValueError."""
    return json.dumps(value, indent=indent, allow_nan=False).encode()


def write_json(path: Path, value: object) -> None:
    """`json_bytes` in a file that appears whole or not at all."""
    write_whole(path, json_bytes(value))


def read_json_object(path: Path, *, advice: str) -> dict[str, Any] | None:
    """The JSON object of a file; None: there is no such file.

    Args:
        path: The file.
        advice: What to do if it holds something else, as a sentence.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}). {advice}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected an object. {advice}")
    return content


# A folder of files and its manifest.


class FileFacts(TypedDict):
    """What a manifest says of a file."""

    sha256: str
    bytes: int


class DamagedFileError(ValueError):
    """A file that is not what was written."""


def described(data: bytes) -> FileFacts:
    """What a manifest says of a file with these bytes."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def is_described(data: bytes, facts: object) -> bool:
    """Whether these are the bytes that a manifest's entry speaks of."""
    if not isinstance(facts, Mapping):
        return False
    return described(data) == {name: facts.get(name) for name in FileFacts.__annotations__}


def read_described(path: Path, facts: object, *, advice: str) -> bytes:
    """The bytes of a file that a manifest lists, if they are those it speaks of."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing though {MANIFEST} lists it. {advice}")
    data = path.read_bytes()
    if not is_described(data, facts):
        listed = facts if isinstance(facts, Mapping) else {}
        raise DamagedFileError(
            f"{path} is damaged or was changed: got {len(data)} bytes with sha256 "
            f"{hashlib.sha256(data).hexdigest()[:12]}..., expected {listed.get('bytes')} with "
            f"{str(listed.get('sha256'))[:12]}..., as {MANIFEST} says. {advice}"
        )
    return data


def write_with_manifest(folder: Path, files: Mapping[str, bytes], manifest: bytes) -> None:
    """All files, then the manifest; a file whose bytes are right already is left alone.

    A crash on the way leaves no manifest: never an old one beside new files.
    """
    path = folder / MANIFEST
    if path.is_file() and path.read_bytes() != manifest:
        path.unlink()
    for name, data in files.items():
        write_changed(folder / name, data)
    write_changed(path, manifest)


# Finished pieces of work.


class HashedFiles:
    """One file per finished piece of work, found again by its name; each holds its own hash."""

    def __init__(self, folder: str | Path, suffix: str) -> None:
        self.folder, self.suffix = Path(folder), suffix

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob(f"*{self.suffix}"))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{self.suffix}"

    def holds(self, name: str) -> bool:
        return self.path(name).is_file()

    def raw(self, name: str) -> bytes | None:
        """The file as it is, hash and all; None: that piece is not finished."""
        path = self.path(name)
        return path.read_bytes() if path.is_file() else None

    def body(self, name: str, raw: bytes) -> bytes:
        """What was put, if `raw` still has the hash that it begins with."""
        return hashed_body(self.path(name), raw)

    def put(self, name: str, body: bytes) -> None:
        """The piece is finished, and on disk when this returns. The folder must be there."""
        write_whole(self.path(name), hashed(body))


def differing_keys(mine: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """Keys under which two identities differ; a missing one counts as None."""
    names = mine.keys() | theirs.keys()
    return sorted(name for name in names if mine.get(name) != theirs.get(name))


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


def digest_of_json(value: object) -> str:
    """sha256 of one JSON value, in any order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def digest_of(*parts: Any) -> str:
    """sha256 of JSON values, the same for the same values whatever their order in mappings."""
    text = json.dumps(parts, sort_keys=True, allow_nan=False, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


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
    folders: list[Path] = []
    try:
        for place in (*reversed(folder.parents), folder):
            if not place.exists():
                place.mkdir()
                folders.append(place)
        if not folder.is_dir():
            raise InputError(
                f"{folder} is a file; expected a folder to write into. Choose another place."
            )
        trial = folder / f".{os.getpid()}.trial"
        try:
            with named_os_errors(folder), open(trial, "wb") as file:
                file.write(b"trial")
        finally:
            trial.unlink(missing_ok=True)
    finally:
        for place in reversed(folders):
            place.rmdir()


def try_file(path: str | Path) -> None:
    """The same of the folder that a file is for."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise IsADirectoryError(21, os.strerror(21), str(path))
    refuse_special_file(path)
    try_folder(path.parent)


def try_outputs(folders: Iterable[str | Path | None], files: Iterable[str | Path | None]) -> None:
    """All of them; None: nothing is written there."""
    for folder in folders:
        if folder is not None:
            try_folder(folder)
    for path in files:
        if path is not None:
            try_file(path)
