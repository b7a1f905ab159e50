"""The table of contents of DCP shards, unpickled without running what it says.

`.metadata` is a pickle, and torch's own reader loads it freely: whatever a stranger wrote into it
runs. Here no class of torch is built from it. The names that DCP writes stand for inert records,
and any other name is refused before it is looked up.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

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


class Record:
    """Stands for any of DCP's classes; keeps what the pickle says of it and does nothing."""

    kind = ""
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # Of this reading alone: a pickle can set attributes of a class that it is given.
        self._given: dict[tuple[str, str], Any] = {
            (module, name): type(name, (Record,), {"kind": name}) for module, name in RECORDS
        }
        self._given |= {pair: lambda *arguments: arguments for pair in VALUES}
        self._given |= PLAIN

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._given:
            return self._given[module, name]
        # Not getattr, which imports what torch loads lazily.
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Refused(f"{module}.{name}")


class _Refused(pickle.UnpicklingError):
    pass


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
            return _Unpickler(file).load()
    except _Refused as error:
        raise ValueError(
            f"{path} was refused: it asks for {error}, and nothing in it was executed. Expected "
            "the records of torch.distributed.checkpoint alone: a torch of another version wrote "
            "it, or somebody who wants code to be run."
        ) from error
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise broken(folder, f"it cannot be read ({type(error).__name__}: {error})") from error


def fields_of(folder: Path, found: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(found, Record) or found.kind != kind or not isinstance(found.state, dict):
        got = found.kind if isinstance(found, Record) else type(found).__name__
        raise broken(folder, f"it has a {got} where a {kind} is expected")
    return found.state


def broken(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"{folder / METADATA}: {what}. The file is damaged, or torch.distributed.checkpoint did "
        "not write it: use an earlier checkpoint."
    )
