"""The files of a finished influence study, each checked against the manifest before it is read.

    open_run(folder)     reads manifest.json (written last, so with it the study is whole)
    files_of(folder)     the same, or a folder of that layout that no study wrote, as it is
    run.summary()        summary.json
    run.read(name)       bytes; run.json, run.array, run.table: parsed

A file that is missing, cut short or changed is an error that names it and says what to do; a file
that the manifest does not list (another study's, a drawing) is not part of the study.
"""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np

from entropy_experiments.artifacts import (
    MANIFEST,
    DamagedFileError,
    FileFacts,
    digest_of_json,
    read_described,
    read_json_object,
)
from entropy_experiments.input_errors import short
from entropy_experiments.results import INFLUENCE, InfluenceResult

if TYPE_CHECKING:
    import pyarrow

IDENTITY = "study.json"
PAGE = "report.html"
"""What `entropy-probe report` leaves beside the data; no file of the study."""

ANOTHER = "Run the study again with --overwrite, or read it with the version that made it."
AGAIN = "Run the same `entropy-probe influence` command again: finished stages are kept."


class ArrayFacts(TypedDict):
    """What an array of a study holds."""

    description: str
    shape: list[int]
    units: str


class StudyManifest(TypedDict):
    """manifest.json of a study; its `digest` has been checked and taken off."""

    format: str
    schema: int
    key: str
    files: dict[str, FileFacts]
    arrays: NotRequired[dict[str, ArrayFacts]]
    stored: NotRequired[dict[str, StoredFacts]]
    """What the files were made from: rollouts and stages. Earlier versions did not list it."""


class StoredFacts(TypedDict, total=False):
    """A file with its hash, or one that begins with its own."""

    sha256: str
    bytes: int
    own_hash: bool


class Files(ABC):
    """Files by name, however they are kept."""

    folder: Path

    @property
    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @property
    def arrays(self) -> Mapping[str, ArrayFacts]:
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

    def summary(self) -> InfluenceResult:
        """summary.json, in a version that is read here; one of another program is as it is."""
        summary = self.json("summary.json")
        if "format" in summary:
            INFLUENCE.check(summary, self.folder / "summary.json", advice=ANOTHER)
        return summary

    def _damaged(self, name: str, kind: str, error: Exception) -> ValueError:
        if isinstance(error, DamagedFileError):
            return error
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        return DamagedFileError(f"{self.folder / name} is not {kind} ({said}). {AGAIN}")


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
    described: Mapping[str, ArrayFacts]

    @property
    def names(self) -> list[str]:
        return list(self.contents)

    @property
    def arrays(self) -> Mapping[str, ArrayFacts]:
        return self.described

    def read(self, name: str) -> bytes:
        return self.contents[name]


@dataclass(frozen=True, kw_only=True)
class RunFiles(Files):
    """A finished study's folder."""

    folder: Path
    manifest: StudyManifest

    @property
    def names(self) -> list[str]:
        return list(self.manifest["files"])

    @property
    def arrays(self) -> Mapping[str, ArrayFacts]:
        return self.manifest.get("arrays", {})

    def read(self, name: str) -> bytes:
        """The file's bytes, which have the hash that the manifest says."""
        path = self.folder / name
        if name not in self:
            raise FileNotFoundError(f"No {name} in {self.folder}: the study has no such file.")
        return read_described(path, self.manifest["files"][name], advice=AGAIN)


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
    INFLUENCE.check(manifest, folder / MANIFEST, advice=ANOTHER)
    return RunFiles(folder=folder, manifest=manifest)


def read_manifest(folder: Path) -> StudyManifest | None:
    """manifest.json, checked; None if there is none."""
    path = folder / MANIFEST
    manifest = read_json_object(path, advice=f"Delete it. {AGAIN}")
    if manifest is None:
        return None
    if manifest.get("format") != INFLUENCE.name:
        raise ValueError(
            f"{path} is not the manifest of an influence study: its format is "
            f"{short(manifest.get('format'), 80)}; expected {INFLUENCE.name!r}, as `entropy-probe "
            "influence` writes it. Give another folder."
        )
    digest = manifest.pop("digest", None)  # studies of earlier versions have none
    if digest is not None and digest != digest_of_json(manifest):
        raise DamagedFileError(
            f"{path} is damaged or was changed: it does not have the digest it says. Delete it. "
            f"{AGAIN}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(facts, dict) for facts in files.values()):
        raise ValueError(f"{path} does not list the study's files. Delete it. {AGAIN}")
    return manifest  # pyright: ignore[reportReturnType]  # JSON, whose format was checked
