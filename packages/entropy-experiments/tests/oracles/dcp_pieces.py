"""DCP checkpoints from one process: torch's own writer, and tensors cut into pieces by hand."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

Boxes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def save_dcp(tree: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(tree, storage_writer=FileSystemWriter(folder))


def write_pieces(folder: Path, tensors: Mapping[str, tuple[Tensor, Boxes]]) -> None:
    """As ranks would: piece i of every tensor goes into the file of rank i."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = Metadata(state_dict_metadata={}, planner_data={}, storage_data={}, version="1.0.0")
    for key, (whole, boxes) in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes]
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=whole.dtype), whole.shape, chunks
        )
        metadata.planner_data[key] = tuple(key.split(".", 1))
        for rank, (offset, size) in enumerate(boxes):
            part = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].clone()
            path = folder / f"__{rank}_0.distcp"
            with path.open("ab") as file:
                start = file.tell()
                torch.save(part, file)
                info = _StorageInfo(path.name, start, file.tell() - start)
            metadata.storage_data[MetadataIndex(key, offset)] = info
    write_metadata(folder, metadata)


def read_metadata(folder: Path) -> Metadata:
    """torch's way, for checkpoints that a test has just written."""
    return pickle.loads((folder / ".metadata").read_bytes())


def write_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
