"""The files of a finished influence study, each checked against the manifest before it is read.

    open_run(folder)     reads manifest.json (written last, so with it the study is whole)
    files_of(folder)     the same, or a folder of that layout that no study wrote, as it is
    run.summary()        summary.json
    run.read(name)       bytes; run.json, run.array, run.table: parsed

A file that is missing, cut short or changed is an error that names it and says what to do; a file
that the manifest does not list (another study's, a drawing) is not part of the study.
"""

from __future__ import annotations

import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow

FORMAT = "entropy_experiments.influence"
SCHEMA = 2
"""2: measured changes are shared among evaluation rollouts as the first-order matrix is."""
MANIFEST, IDENTITY = "manifest.json", "study.json"
PAGE = "report.html"
"""What `entropy-probe report` leaves beside the data; no file of the study."""
DESCRIBED = ("sha256", "bytes")

AGAIN = "Run the same `entropy-probe influence` command again: finished stages are kept."


class Files(ABC):
    """Files by name, however they are kept."""

    folder: Path

    @property
    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @property
    def arrays(self) -> Mapping[str, Any]:
        """What each array holds, where that was written down."""
        return {}

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def json(self, name: str) -> Any:
        try:
            return json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise self._damaged(name, "JSON", error) from error

    def array(self, name: str) -> np.ndarray:
        data = self.read(name)
        try:
            return np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise self._damaged(name, "a numpy array", error) from error

    def table(self, name: str) -> pyarrow.Table:
        import pyarrow.parquet

        data = self.read(name)
        try:
            return pyarrow.parquet.read_table(io.BytesIO(data))
        except (pyarrow.ArrowException, OSError) as error:
            raise self._damaged(name, "a parquet table", error) from error

    def summary(self) -> dict[str, Any]:
        return self.json("summary.json")

    def _damaged(self, name: str, kind: str, error: Exception) -> ValueError:
        if isinstance(error, DamagedFileError):
            return error
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        return DamagedFileError(f"{self.folder / name} is not {kind} ({said}). {AGAIN}")


class DamagedFileError(ValueError):
    """A file that is not what the study wrote."""


@dataclass(frozen=True, kw_only=True)
class PlainFiles(Files):
    """A folder without a manifest."""

    folder: Path

    @property
    def names(self) -> list[str]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in found)

    def read(self, name: str) -> bytes:
        path = self.folder / name
        if not path.is_file():
            raise FileNotFoundError(f"No {name} in {self.folder}.")
        return path.read_bytes()


@dataclass(frozen=True, kw_only=True)
class NewFiles(Files):
    """Files of a study that are about to be written."""

    folder: Path
    contents: Mapping[str, bytes]
    described: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return list(self.contents)

    @property
    def arrays(self) -> Mapping[str, Any]:
        return self.described

    def read(self, name: str) -> bytes:
        return self.contents[name]


@dataclass(frozen=True, kw_only=True)
class RunFiles(Files):
    """A finished study's folder."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return list(self.manifest["files"])

    @property
    def arrays(self) -> Mapping[str, Any]:
        return self.manifest.get("arrays", {})

    def read(self, name: str) -> bytes:
        """The file's bytes, which have the hash that the manifest says."""
        path = self.folder / name
        if name not in self:
            raise FileNotFoundError(f"No {name} in {self.folder}: the study has no such file.")
        if not path.is_file():
            raise FileNotFoundError(f"No {name} in {self.folder}, which the study had. {AGAIN}")
        data = path.read_bytes()
        expected = {key: self.manifest["files"][name].get(key) for key in DESCRIBED}
        if described(data) != expected:
            raise DamagedFileError(
                f"{path} is damaged or was changed: {len(data)} bytes, expected the "
                f"{expected['bytes']} bytes whose hash is in {MANIFEST}. {AGAIN}"
            )
        return data


def files_of(folder: str | Path) -> Files:
    """`open_run`; a folder that no study wrote (no manifest.json, no study.json) as it is."""
    folder = Path(folder)
    if folder.is_dir() and not any((folder / name).exists() for name in (MANIFEST, IDENTITY)):
        return PlainFiles(folder=folder)
    return open_run(folder)


def open_run(folder: str | Path) -> RunFiles:
    """The folder of a finished study. Its files are checked as they are read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"No folder {folder}; expected the run directory of a study.")
    manifest = read_manifest(folder)
    if manifest is None:
        if (folder / IDENTITY).is_file():
            raise FileNotFoundError(
                f"No {MANIFEST} in {folder}: the study is not finished. {AGAIN}"
            )
        raise FileNotFoundError(
            f"No {MANIFEST} in {folder}; expected the run directory of a finished study, as "
            "`entropy-probe influence --out` makes it."
        )
    if manifest.get("schema") != SCHEMA:
        raise ValueError(
            f"{folder / MANIFEST} has schema {manifest.get('schema')!r}, this version reads "
            f"{SCHEMA}. Run the study again with --overwrite, or read it with the version that "
            "made it."
        )
    return RunFiles(folder=folder, manifest=manifest)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """manifest.json, checked; None if there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}). Delete it. {AGAIN}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not the manifest of an influence study; expected format {FORMAT!r}. "
            "Give another folder."
        )
    said = found.pop("digest", None)  # studies of earlier versions have none
    if said is not None and said != manifest_digest(found):
        raise DamagedFileError(
            f"{path} is damaged or was changed: it does not have the digest it says. Delete it. "
            f"{AGAIN}"
        )
    files = found.get("files")
    if not isinstance(files, dict) or not all(isinstance(facts, dict) for facts in files.values()):
        raise ValueError(f"{path} does not list the study's files. Delete it. {AGAIN}")
    return found


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Of a manifest without its digest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def described(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
