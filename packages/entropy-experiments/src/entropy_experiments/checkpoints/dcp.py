"""Tensors in the shards of torch.distributed.checkpoint (DCP), read without a process group.

    FOLDER/.metadata      a pickle: which pieces of which tensor lie where
    FOLDER/__R_I.distcp   of rank R: pieces, one torch.save after another

Both are a stranger's files, and no code of theirs is run. The slices that a shard is said to hold
must tile it, the pieces of a tensor must tile the tensor, and each is loaded with `weights_only`,
after the CRC that torch.save wrote (and torch.load does not look at) was found to be right. In
memory is one tensor and one piece of it.

torch's own reader unpickles `.metadata` freely: whatever a stranger wrote into it runs. Here the
names that DCP writes stand for inert records (`inert_pickle`), and any other name is refused.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.checkpoints.inert_pickle import (
    DAMAGED_PICKLE,
    InertUnpickler,
    Record,
    RefusedName,
)
from entropy_experiments.checkpoints.torch_files import check_crc, is_zip

METADATA = ".metadata"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
RECORDS = {
    *(
        (_METADATA_MODULE, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
}
VALUES = {
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    *((module, "WindowsPath") for module in ("pathlib", "pathlib._local")),
}
"""Called with plain values, and of no interest: the call gives its arguments back."""
PLAIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): OrderedDict}
SHARD = ".distcp"
VERSIONS = (None, "1.0.0")
"""DCP's own; torch before 2.3 wrote none."""
DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What torch.load may raise on a pickle with changed bytes, where no CRC tells first."""
Key = tuple[str, tuple[int, ...] | None]
Steps = tuple[str | int, ...]


def read_metadata(folder: Path) -> Any:
    path = folder / METADATA
    if not path.is_file():
        alone = sorted(file.name for file in folder.glob(f"__*{METADATA}"))
        if alone:
            raise ValueError(
                f"{folder} was saved without coordination of the ranks: it has {alone[0]} instead "
                f"of {METADATA}, and each rank's table alone. Expected {METADATA}: save with "
                "torch.distributed.checkpoint.save, use_collectives left on."
            )
        raise FileNotFoundError(
            f"{folder} has shards but no {METADATA}, which is written last. Saving was interrupted "
            "(use an earlier checkpoint), or the folder was copied without its hidden files (copy "
            "that one too)."
        )
    if (folder / f"{METADATA}.tmp").exists():
        raise ValueError(
            f"{folder} is half-written: {METADATA}.tmp shows that a save into it was interrupted, "
            "and its shards may be of two saves. Use an earlier checkpoint."
        )
    try:
        with path.open("rb") as file:
            # Made anew for each file: a pickle can set attributes of a function that it is given.
            calls = {pair: lambda *arguments: arguments for pair in VALUES} | PLAIN
            return InertUnpickler(file, records=RECORDS, calls=calls).load()
    except RefusedName as error:
        raise ValueError(
            f"{path} was refused: it asks for {error}, and nothing in it was executed. Expected "
            "the records of torch.distributed.checkpoint alone: a torch of another version wrote "
            "it, or somebody who wants code to be run."
        ) from error
    except DAMAGED_PICKLE as error:
        raise broken(folder, f"it cannot be read ({type(error).__name__}: {error})") from error


def fields_of(folder: Path, record: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(record, Record) or record.kind != kind or not isinstance(record.state, dict):
        got = record.kind if isinstance(record, Record) else type(record).__name__
        raise broken(folder, f"it has a {got} where a {kind} is expected")
    return record.state


def broken(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"{folder / METADATA}: {what}. The file is damaged, or torch.distributed.checkpoint did "
        "not write it: use an earlier checkpoint."
    )


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Bytes of a file: one torch.save."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    where: Slice


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedFiles:
    """What a folder holds, by DCP's key; nothing of it is in memory."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Slice]
    paths: Mapping[str, Steps]
    """How each key was reached in the nested dict that was saved."""

    def tensor(self, key: str) -> Tensor:
        stored = self.tensors[key]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for piece in stored.pieces:
            part = self._load(key, piece.where)
            if type(part) is not Tensor or part.layout != torch.strided:
                raise self._differs(key, piece.where, f"a {type(part).__name__}", "a tensor")
            got, expected = (tuple(part.shape), part.dtype), (piece.size, stored.dtype)
            if got != expected:
                raise self._differs(key, piece.where, str(got), str(expected))
            box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))
            whole[box] = part
        return whole

    def value(self, key: str) -> Any:
        return self._load(key, self.values[key])

    def _load(self, key: str, where: Slice) -> Any:
        path = self.folder / where.file
        with path.open("rb") as file:
            file.seek(where.start)
            content = file.read(where.length)
        try:
            if not is_zip(stream := io.BytesIO(content)):
                # torch.load would take it for its format of before 1.6, which is older than DCP.
                raise zipfile.BadZipFile("it is not a zip file, as torch.save writes")
            check_crc(stream)
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(
                f"{path} was refused: {key!r} is more than tensors and plain values, and nothing "
                f"in it was executed ({first}). If you trust the file, save the checkpoint again "
                "with plain values."
            ) from error
        except (*DAMAGE, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{path}: {key!r}, {where.length} bytes at {where.start}, cannot be read "
                f"({type(error).__name__}: {error}). The file is damaged, or of another save than "
                f"{METADATA}: use an earlier checkpoint."
            ) from error

    def _differs(self, key: str, where: Slice, got: str, expected: str) -> ValueError:
        return ValueError(
            f"{self.folder / where.file}: a piece of {key!r} is {got}; expected {expected} from "
            f"{METADATA}. The files are of different saves: use an earlier checkpoint."
        )


def read_sharded(folder: Path) -> ShardedFiles:
    """The table of contents, checked against the files."""
    metadata = fields_of(folder, read_metadata(folder), "Metadata")
    version = metadata.get("version")
    if version not in VERSIONS:
        raise ValueError(
            f"{folder / METADATA} is of DCP's version {version!r}; expected "
            f"{VERSIONS[-1]!r}. A newer torch wrote it: update this program, or export the "
            "weights as safetensors with that torch."
        )
    slices = _slices(folder, metadata.get("storage_data"))
    _check_files(folder, slices.values())
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Slice] = {}
    entries = _mapping(folder, metadata.get("state_dict_metadata"), "state_dict_metadata")
    for key, entry in entries.items():
        if not isinstance(key, str):
            raise broken(folder, f"a key is {key!r}; expected text")
        if isinstance(entry, Record) and entry.kind == "BytesStorageMetadata":
            values[key] = _at(folder, slices, (key, None))
        else:
            tensors[key] = _tensor(folder, key, entry, slices)
    paths = _paths(folder, metadata.get("planner_data"), entries)
    return ShardedFiles(folder=folder, tensors=tensors, values=values, paths=paths)


def newer_shards(folder: Path) -> tuple[str, ...]:
    """A note, if a shard was written after the table, which DCP writes last.

    Tensors of the same sizes make files of the same sizes, so the table cannot tell their saves
    apart. Not an error, for a copy has times of its own.
    """
    written = (folder / METADATA).stat().st_mtime_ns
    late = sorted(f.name for f in folder.glob(f"*{SHARD}") if f.stat().st_mtime_ns > written)
    if not late:
        return ()
    return (
        f"whether the shards are of one save: {folder.name}/{late[0]} ({len(late)} in all) is "
        f"newer than {METADATA}, which is written last, as after a copy or another save",
    )


def _slices(folder: Path, storage_data: Any) -> dict[Key, Slice]:
    slices: dict[Key, Slice] = {}
    for index, info in _mapping(folder, storage_data, "storage_data").items():
        at = fields_of(folder, index, "MetadataIndex")
        where = fields_of(folder, info, "_StorageInfo")
        name, offset, file = at.get("fqn"), at.get("offset"), where.get("relative_path")
        if not isinstance(name, str) or not isinstance(file, str):
            raise broken(folder, f"storage_data has {name!r} in {file!r}; expected text")
        start, length = _size(folder, name, (where.get("offset"), where.get("length")))
        key = (name, None if offset is None else _size(folder, name, offset))
        if key in slices:
            raise broken(folder, f"storage_data has {name!r} at {offset} twice")
        if Path(file).name != file or file in ("", "..") or "\\" in file or "\0" in file:
            raise ValueError(
                f"{folder / METADATA}: {name!r} is said to be in {file!r}; expected a file of the "
                "same folder. Nothing was opened: the checkpoint is not DCP's own."
            )
        if where.get("transform_descriptors"):
            raise ValueError(
                f"{folder / METADATA}: {name!r} was written through the extension "
                f"{where['transform_descriptors']}; expected plain files. Save the checkpoint "
                "without extensions."
            )
        slices[key] = Slice(file=file, start=start, length=length)
    return slices


def _check_files(folder: Path, slices: Iterable[Slice]) -> None:
    """Every file is there and is nothing but its slices; one that was cut or replaced is not."""
    inside: dict[str, list[Slice]] = {}
    for one in slices:
        inside.setdefault(one.file, []).append(one)
    missing = sorted(name for name in inside if not (folder / name).is_file())
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {missing[:4]} ({len(missing)} of {len(inside)} shards). Expected "
            f"every file that {METADATA} names: the folder was copied in part, or the ranks of "
            "other machines wrote to their own disks. Put all shards into one folder."
        )
    for name, parts in inside.items():
        end = 0
        for one in sorted(parts, key=lambda one: one.start):
            if one.start != end:
                raise broken(folder, f"{name} has a gap or an overlap at byte {end}")
            end += one.length
        size = (folder / name).stat().st_size
        if size != end:
            raise ValueError(
                f"{folder / name} has {size} bytes; expected {end} from {METADATA}. It is "
                "truncated, or was written by another save: copy it again, or use an earlier "
                "checkpoint."
            )
    # A rank that had nothing to write leaves an empty file.
    others = sorted(
        file.name
        for file in folder.glob(f"*{SHARD}")
        if file.name not in inside and file.stat().st_size
    )
    if others:
        raise ValueError(
            f"{folder} has {others[:4]} ({len(others)} in all), which {METADATA} does not name. "
            "They are of another save into this folder, with more ranks: remove them if that was "
            "the earlier one; otherwise use an earlier checkpoint."
        )


def _tensor(folder: Path, key: str, entry: Any, slices: Mapping[Key, Slice]) -> StoredTensor:
    fields = fields_of(folder, entry, "TensorStorageMetadata")
    properties, shape = fields.get("properties"), _size(folder, key, fields.get("size"))
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype):
        raise broken(folder, f"{key!r} has no dtype")
    boxes = fields.get("chunks")
    pieces: list[Piece] = []
    for chunk in boxes if isinstance(boxes, list) else ():
        box = fields_of(folder, chunk, "ChunkStorageMetadata")
        offset, size = (_size(folder, key, box.get(name)) for name in ("offsets", "sizes"))
        if len(offset) != len(shape) or len(size) != len(shape):
            raise broken(folder, f"{key!r} of shape {shape} has a piece of {size} at {offset}")
        if not prod(size):
            continue  # of a rank for which nothing was left
        where = _at(folder, slices, (key, offset))
        # So that a few bytes cannot ask for all memory: the numbers must be there.
        if prod(size) * dtype.itemsize > where.length:
            raise broken(folder, f"{key!r}: {size} numbers cannot lie in {where.length} bytes")
        pieces.append(Piece(offset=offset, size=size, where=where))
    _check_cover(folder, key, shape, pieces)
    return StoredTensor(dtype=dtype, shape=shape, pieces=tuple(pieces))


def _check_cover(folder: Path, key: str, shape: tuple[int, ...], pieces: list[Piece]) -> None:
    """Within the tensor, disjoint, and as many numbers: then every number is there once."""
    inside = all(
        o + n <= whole for p in pieces for o, n, whole in zip(p.offset, p.size, shape, strict=True)
    )
    held = sum(prod(piece.size) for piece in pieces)
    if not inside or held != prod(shape) or _overlap(pieces):
        raise ValueError(
            f"{folder / METADATA}: {key!r} has shape {shape}, and its {len(pieces)} pieces hold "
            f"{held} of {prod(shape)} numbers, or overlap. Expected every number once: a rank's "
            "part was not saved, or the file is damaged. Use an earlier checkpoint."
        )


def _overlap(pieces: list[Piece]) -> bool:
    ordered = sorted(pieces, key=lambda piece: piece.offset)
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if one.offset and other.offset[0] >= one.offset[0] + one.size[0]:
                break
            boxes = zip(one.offset, one.size, other.offset, other.size, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in boxes):
                return True
    return False


def _paths(folder: Path, planner_data: Any, keys: Iterable[str]) -> dict[str, Steps]:
    planned = {} if planner_data is None else _mapping(folder, planner_data, "planner_data")
    paths: dict[str, Steps] = {}
    for key in keys:
        steps = planned.get(key, (key,))
        plain = isinstance(steps, tuple) and all(type(one) in (str, int) for one in steps)
        if not plain or ".".join(map(str, steps)) != key:
            raise broken(folder, f"the path of {key!r} is {steps!r}")
        paths[key] = steps
    return paths


def _at(folder: Path, slices: Mapping[Key, Slice], key: Key) -> Slice:
    if key not in slices:
        raise broken(folder, f"storage_data does not say where {key[0]!r} at {key[1]} is")
    return slices[key]


def _mapping(folder: Path, value: Any, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise broken(folder, f"{what} is a {type(value).__name__}, not a mapping")
    return value


def _size(folder: Path, key: str, size: Any) -> tuple[int, ...]:
    plain = isinstance(size, tuple) and all(type(n) is int and 0 <= n < 2**62 for n in size)
    if not plain:
        raise broken(folder, f"{key!r} has the size, offset or length {size!r}")
    return tuple(size)
