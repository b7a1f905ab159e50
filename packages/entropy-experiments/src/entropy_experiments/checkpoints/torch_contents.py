"""What a file of torch.save holds, DTensors included, and its tensors one at a time.

    FILE.pt            a zip archive of stored records
      NAME/data.pkl    a pickle: the object, each tensor by the number of its storage
      NAME/data/N      the bytes of storage N

torch.load builds every DTensor with the classes of the installed torch, maps or reads the whole
file, and a mesh complains that there is no process group. Here nothing of torch is built from the
pickle (`inert_pickle`): a tensor is its dtype, its shape and where its numbers lie, a DTensor is
that of its local tensor with the placements beside it. So a shard of any torch since 2.5 is read
without its process group and without its devices, and in memory is the one tensor that was asked
for. The CRC of every record, at which torch.load does not look, is checked first.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
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
from entropy_experiments.input_errors import check_regular, words_of

LARGEST_PICKLE = 512 * 2**20
"""Bytes of data.pkl, which names tensors and holds none of their numbers."""
LOCAL_HEADER = 30
"""Bytes of a zip record's own header before its name."""
DISTRIBUTED = "torch.distributed"
"""Every class below it is an inert record: placements, specs, meshes of any version."""
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A strided tensor in the file; `offset` and `stride` count numbers of its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: str


@dataclass(frozen=True, kw_only=True)
class LocalPart:
    """One rank's part of a DTensor of `shape`."""

    shape: tuple[int, ...]
    local: StoredTensor
    placements: tuple[Record, ...]
    mesh: Record

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def coordinate(self) -> tuple[int, ...] | None:
        """Of the rank that saved it, in its device mesh; None: the file does not say."""
        state = self.mesh.state
        at = state.get("_coordinate_on_dim") if isinstance(state, dict) else None
        whole = isinstance(at, tuple | list) and all(type(n) is int and n >= 0 for n in at)
        return tuple(at) if whole else None  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class _Storage:
    dtype: torch.dtype | None
    key: str
    size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchContents:
    """The object in a file, its tensors as `StoredTensor` and `LocalPart`."""

    path: Path
    tree: Any
    records: Mapping[str, tuple[int, int]]
    """Of a storage: the first byte in the file, and how many."""

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Read its numbers, and no others."""
        start, length = self.records[stored.storage]
        size, width = prod(stored.shape), stored.dtype.itemsize
        if not size:
            return torch.empty(stored.shape, dtype=stored.dtype)
        last = stored.offset + sum(
            (n - 1) * step for n, step in zip(stored.shape, stored.stride, strict=True)
        )
        if (last + 1) * width > length:
            raise ValueError(
                f"{self.path}: a tensor of shape {stored.shape} ends at number {last} of its "
                f"storage, which has {length // width}. The file is damaged: copy it again, or "
                "use another checkpoint."
            )
        span = last - stored.offset + 1
        buffer = bytearray(span * width)
        with self.path.open("rb") as file:
            file.seek(start + stored.offset * width)
            if file.readinto(buffer) != len(buffer):
                raise ValueError(
                    f"{self.path} became shorter while it was read. Copy it again, once it is "
                    "written whole."
                )
        flat = torch.frombuffer(buffer, dtype=stored.dtype)
        return flat.as_strided(stored.shape, stored.stride)


def read_torch_contents(path: Path) -> TorchContents:
    """The table of contents; nothing of a tensor is in memory.

    Raises:
        ValueError: If the file is damaged, or names anything but tensors and plain values.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            if not is_zip(file):
                raise zipfile.BadZipFile("it is not a zip file, as torch.save writes")
            check_crc(file)
            with zipfile.ZipFile(file) as archive:
                pickled, records = _records(archive, file)
            tree = _read_tree(pickled, records)
    except RefusedName as error:
        raise ValueError(
            f"{path} was refused: it asks for {error}, and nothing in it was executed. Expected "
            "tensors, DTensors and plain values, as torch.save(state_dict) writes them."
        ) from error
    except (zipfile.BadZipFile, struct.error) as error:
        raise ValueError(
            f"{path} cannot be read: it is truncated or damaged ({error}); expected the bytes "
            "that torch.save wrote. Copy the file again, or use another checkpoint."
        ) from error
    except DAMAGED_PICKLE as error:
        raise ValueError(
            f"{path} cannot be read ({words_of(error)}). Its pickle is damaged, or torch.save did "
            "not write it: use another checkpoint."
        ) from error
    return TorchContents(path=path, tree=tree, records=records)


def _records(archive: zipfile.ZipFile, file: Any) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The pickle, and where the storages lie."""
    names = [info.filename for info in archive.infolist()]
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(set(names)) < len(names) or len(pickles) != 1:
        raise zipfile.BadZipFile(f"it has {len(pickles)} records data.pkl, or one name twice")
    folder = pickles[0].removesuffix("data.pkl")
    order = f"{folder}byteorder"
    if order in names and archive.read(order) != b"little":
        raise zipfile.BadZipFile("it was written on a big-endian machine")
    if archive.getinfo(pickles[0]).file_size > LARGEST_PICKLE:
        raise zipfile.BadZipFile(f"its data.pkl is larger than {LARGEST_PICKLE} bytes")
    records: dict[str, tuple[int, int]] = {}
    for info in archive.infolist():
        if not info.filename.startswith(f"{folder}data/"):
            continue
        file.seek(info.header_offset)
        header = file.read(LOCAL_HEADER)
        name, extra = struct.unpack("<HH", header[26:30])
        first = info.header_offset + LOCAL_HEADER + name + extra
        records[info.filename.removeprefix(f"{folder}data/")] = (first, info.file_size)
    return archive.read(pickles[0]), records


def _read_tree(pickled: bytes, records: Mapping[str, tuple[int, int]]) -> Any:
    def storage(pid: Any) -> _Storage:
        word, kind, key, _place, size = pid
        if word != "storage" or not isinstance(kind, _Kind) or type(size) is not int:
            raise ValueError("a persistent id that is no storage")
        width = 1 if kind.dtype is None else kind.dtype.itemsize
        if key not in records or not 0 <= size * width <= records[key][1]:
            raise ValueError(f"storage {key!r} of {size} numbers is not in the file")
        return _Storage(dtype=kind.dtype, key=key, size=size)

    def tensor_v2(kept: _Storage, offset: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
        return _stored(kept, kept.dtype, offset, shape, stride)

    def tensor_v3(kept: _Storage, offset: int, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
        _requires_grad, _hooks, dtype = rest[:3]
        return _stored(kept, dtype, offset, shape, stride)

    # Made anew for each file: a pickle can set attributes of a function that it is given.
    calls: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor_v2"): tensor_v2,
        ("torch._utils", "_rebuild_tensor_v3"): tensor_v3,
        ("torch._utils", "_rebuild_wrapper_subclass"): lambda *arguments: arguments,
        ("torch._tensor", "_rebuild_from_type_v2"): _distributed_tensor(),
        ("torch.serialization", "_get_layout"): lambda *arguments: arguments,
        ("torch", "device"): lambda *arguments: arguments,
        ("torch", "Size"): tuple,
        ("collections", "OrderedDict"): OrderedDict,
        ("collections", "defaultdict"): lambda *arguments: {},
        ("torch.storage", "UntypedStorage"): _Kind(dtype=None),
    }
    calls |= {("torch", name): _Kind(dtype=dtype) for name, dtype in STORAGES.items()}
    reader = _DistributedUnpickler(io.BytesIO(pickled), records=(), calls=calls, storages=storage)
    return reader.load()


@dataclass(frozen=True)
class _Kind:
    """Of a storage."""

    dtype: torch.dtype | None


class _DistributedUnpickler(InertUnpickler):
    """As its parent; a class below torch.distributed is a record, whatever its name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == DISTRIBUTED or module.startswith(f"{DISTRIBUTED}."):
            key = (module, name)
            if key not in self.substitutes:
                self.substitutes[key] = type("Record", (Record,), {"kind": name})
            return self.substitutes[key]
        return super().find_class(module, name)


def _distributed_tensor() -> Any:
    def build(_rebuild: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """`state`: the attributes of a DTensor, of which two are its own."""
        attributes = state
        if isinstance(state, tuple) and len(state) == 2:  # __dict__ and __slots__
            attributes = {**(state[0] or {}), **(state[1] or {})}
        name = getattr(kind, "kind", "")
        local = attributes.get("_local_tensor") if isinstance(attributes, dict) else None
        spec = attributes.get("_spec") if isinstance(attributes, dict) else None
        if name != "DTensor" or not isinstance(local, StoredTensor):
            raise ValueError(f"a tensor of class {name or kind!r}, whose numbers are not a tensor")
        fields = spec.state if isinstance(spec, Record) else None
        placements = fields.get("placements") if isinstance(fields, dict) else None
        mesh = fields.get("mesh") if isinstance(fields, dict) else None
        if not isinstance(placements, tuple) or not isinstance(mesh, Record):
            raise ValueError("a DTensor without placements or without a device mesh")
        if not all(isinstance(one, Record) for one in placements):
            raise ValueError("a DTensor whose placements are none")
        shape = _sizes(arguments[2])
        return LocalPart(shape=shape, local=local, placements=placements, mesh=mesh)

    return build


def _stored(
    kept: _Storage, dtype: torch.dtype | None, offset: Any, shape: Any, stride: Any
) -> StoredTensor:
    if not isinstance(kept, _Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a storage or without a dtype")
    sizes, steps = _sizes(shape), _sizes(stride)
    (start,) = _sizes((offset,))
    if len(sizes) != len(steps):
        raise ValueError(f"a tensor of shape {sizes} has strides {steps}")
    return StoredTensor(dtype=dtype, shape=sizes, stride=steps, offset=start, storage=kept.key)


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(n) is int and 0 <= n < 2**62 for n in values):
        raise ValueError(f"sizes {values!r}")
    return values
