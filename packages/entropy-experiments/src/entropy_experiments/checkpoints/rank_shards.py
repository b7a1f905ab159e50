"""Files of single ranks, one torch.save each, put together: what verl and SkyRL save under FSDP2.

    FOLDER/model_world_size_W_rank_R.pt    {name: DTensor}
    FOLDER/optim_world_size_W_rank_R.pt    optimizer.state_dict(), its moments DTensors

A DTensor says how the whole is cut: `Shard(d)` over one dimension of the device mesh, in chunks of
ceil(n / size) along dimension d, so that the last ranks may hold fewer rows or none; `Replicate`
over the others (hybrid sharding), whose copies must agree. What is no DTensor is the same on every
rank.
Every rank must be there, hold the same names, and its part must have the shape that its place in
the mesh gives it: then every number is read once. In memory is the tensor that is filled, and one
rank's part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.checkpoints.torch_contents import (
    LocalPart,
    StoredTensor,
    TorchContents,
    read_torch_contents,
)
from entropy_experiments.checkpoints.verl_folder import rank_files

LEAVES = (StoredTensor, LocalPart)
Box = tuple[tuple[int, int], ...]
"""(start, end) along each dimension."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankFiles:
    """The contents of every rank's file; nothing of a tensor is in memory."""

    ranks: tuple[TorchContents, ...]

    @property
    def folder(self) -> Path:
        return self.ranks[0].path.parent

    @property
    def trees(self) -> tuple[Any, ...]:
        return tuple(one.tree for one in self.ranks)

    def shape(self, name: str, parts: Sequence[Any]) -> tuple[int, ...]:
        """Of the whole tensor; `parts`: what each rank holds of it."""
        self._check_alike(name, parts)
        return parts[0].shape

    def tensor(self, name: str, parts: Sequence[Any]) -> Tensor:
        """The whole tensor; `name` for messages."""
        whole = torch.empty(self.shape(name, parts), dtype=parts[0].dtype)
        self.copy_into(whole, name, parts)
        return whole

    def copy_into(self, target: Tensor, name: str, parts: Sequence[Any]) -> None:
        """Fill a tensor of the whole's shape part by part, in its own dtype."""
        filled: set[Box] = set()
        for rank, box, value in self._read(name, parts):
            place = _at(target, box)
            if box not in filled:
                place.copy_(value)
                filled.add(box)
            elif not _equal(place, value):
                raise self._copies_differ(name, rank)

    def agrees(self, target: Tensor, name: str, parts: Sequence[Any]) -> bool:
        """Whether a tensor has the stored numbers, rounded to its dtype."""
        return all(_equal(_at(target, box), value) for _, box, value in self._read(name, parts))

    def _read(self, name: str, parts: Sequence[Any]) -> Iterator[tuple[int, Box, Tensor]]:
        """(rank, where its part lies, the part), one part in memory at a time."""
        self._check_alike(name, parts)
        boxes: Sequence[Box]
        if isinstance(parts[0], StoredTensor):
            boxes = [tuple((0, n) for n in parts[0].shape)] * len(parts)
        else:
            boxes = self._boxes(name, parts)
        for rank, (part, box) in enumerate(zip(parts, boxes, strict=True)):
            local = part if isinstance(part, StoredTensor) else part.local
            yield rank, box, self.ranks[rank].tensor(local)

    def _copies_differ(self, name: str, rank: int) -> ValueError:
        return ValueError(
            f"{self.ranks[rank].path}: {name!r} is not cut over these ranks, and differs from the "
            "copy of an earlier rank; expected the same numbers. The files are of different "
            "saves, or of FSDP1, whose parts do not say how they are cut: use another checkpoint, "
            "saved with actor.strategy=fsdp2."
        )

    def _check_alike(self, name: str, parts: Sequence[Any]) -> None:
        first = parts[0]
        for rank, part in enumerate(parts):
            if type(part) is not type(first) or not isinstance(part, LEAVES):
                raise ValueError(
                    f"{self.ranks[rank].path}: {name!r} is a {_kind(part)}, and a {_kind(first)} "
                    f"on rank 0; expected a tensor, cut alike on every rank. {_OTHER_SAVES}"
                )
            same = (part.shape, part.dtype) == (first.shape, first.dtype)
            if not same or _words(part) != _words(first):
                raise ValueError(
                    f"{self.ranks[rank].path}: {name!r} is {_words(part)}; expected "
                    f"{_words(first)}, as on rank 0. {_OTHER_SAVES}"
                )

    def _boxes(self, name: str, parts: Sequence[LocalPart]) -> tuple[Box, ...]:
        """Where each rank's part lies."""
        cut = self._cut_dimension(name, parts[0])
        coordinates = self._coordinates(name, parts)
        boxes: list[Box] = []
        for rank, (part, at) in enumerate(zip(parts, coordinates, strict=True)):
            box = [(0, n) for n in part.shape]
            if cut is not None:
                mesh_dimension, dimension = cut
                count = 1 + max(other[mesh_dimension] for other in coordinates)
                n = part.shape[dimension]
                chunk = -(-n // count)
                start = min(at[mesh_dimension] * chunk, n)
                box[dimension] = (start, min(start + chunk, n))
            expected = tuple(end - start for start, end in box)
            if part.local.shape != expected:
                raise ValueError(
                    f"{self.ranks[rank].path}: the part of {name!r} has shape {part.local.shape}; "
                    f"expected {expected} of {part.shape} at place {at} of the device mesh. "
                    f"{_OTHER_SAVES}"
                )
            boxes.append(tuple(box))
        return tuple(boxes)

    def _cut_dimension(self, name: str, part: LocalPart) -> tuple[int, int] | None:
        """(dimension of the mesh, dimension of the tensor) that is cut; None: copies alone."""
        cuts: list[tuple[int, int]] = []
        for number, placement in enumerate(part.placements):
            state = placement.state if isinstance(placement.state, dict) else {}
            dimension = state.get("dim")
            if placement.kind == "Replicate":
                continue
            if (
                placement.kind != "Shard"
                or type(dimension) is not int
                or not -len(part.shape) <= dimension < len(part.shape)
            ):
                raise ValueError(
                    f"{self.ranks[0].path}: {name!r} is placed as {_words(part)}; expected Shard "
                    "and Replicate, as FSDP2 places parameters. A partial sum or a strided shard "
                    "(tensor parallelism) cannot be put together here: merge the checkpoint with "
                    "the program that saved it."
                )
            cuts.append((number, dimension % len(part.shape)))
        if len(cuts) > 1:
            raise ValueError(
                f"{self.ranks[0].path}: {name!r} is cut along {len(cuts)} dimensions of the device "
                f"mesh ({_words(part)}); expected one, as FSDP2 cuts without tensor parallelism. "
                "Merge the checkpoint with the program that saved it."
            )
        return cuts[0] if cuts else None

    def _coordinates(self, name: str, parts: Sequence[LocalPart]) -> list[tuple[int, ...]]:
        """Each rank's place in the mesh; every place once."""
        dimensions = len(parts[0].placements)
        places: list[tuple[int, ...]] = []
        for rank, part in enumerate(parts):
            at = part.coordinate
            if at is None and dimensions == 1:
                at = (rank,)  # the mesh of all ranks
            if at is None or len(at) != dimensions:
                raise ValueError(
                    f"{self.ranks[rank].path}: {name!r} has {dimensions} placements, and its rank "
                    f"the place {at} in the device mesh; expected a place for each. {_OTHER_SAVES}"
                )
            places.append(at)
        sizes = [1 + max(place[d] for place in places) for d in range(dimensions)]
        count = 1
        for size in sizes:
            count *= size
        if len(set(places)) != len(places) or count != len(places):
            raise ValueError(
                f"{self.folder}: {name!r} is on the places {sorted(set(places))[:8]} of a device "
                f"mesh; expected every place of a mesh of {len(places)} ranks once. {_OTHER_SAVES}"
            )
        return places


_OTHER_SAVES = "The files are of different saves, or damaged: use another checkpoint."


def read_rank_files(path: Path) -> RankFiles:
    """`path`: the file of any rank."""
    return RankFiles(ranks=tuple(read_torch_contents(file) for file in rank_files(path)))


class RankWeights(Mapping[str, Tensor]):
    """A model's tensors by name; each is put together whenever it is asked for."""

    def __init__(self, files: RankFiles, keys: Mapping[str, str]) -> None:
        self.files, self._keys = files, keys

    def __getitem__(self, name: str) -> Tensor:
        return self.files.tensor(name, self._parts(name))

    def copy_into(self, target: Tensor, name: str) -> None:
        """As target.copy_(self[name]), with one rank's part in memory in place of the whole."""
        self.files.copy_into(target, name, self._parts(name))

    def agrees(self, target: Tensor, name: str) -> bool:
        return self.files.agrees(target, name, self._parts(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Without reading a tensor."""
        return {name: self.files.shape(name, self._parts(name)) for name in self._keys}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: self._parts(name)[0].dtype for name in self._keys}

    def _parts(self, name: str) -> list[Any]:
        key = self._keys[name]
        return [tree[key] for tree in self.files.trees]


def refuse_other_names(files: RankFiles, what: str, keys: Sequence[Sequence[Any]]) -> None:
    """`keys`: of each rank; they must be the same, in any order."""
    first = set(keys[0])
    for rank, names in enumerate(keys):
        missing, extra = sorted(first - set(names), key=str), sorted(set(names) - first, key=str)
        if missing or extra:
            raise ValueError(
                f"{files.ranks[rank].path} holds other {what} than rank 0: missing {missing[:4]}, "
                f"extra {extra[:4]}; expected the same on every rank. {_OTHER_SAVES}"
            )


def _at(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(start, end) for start, end in box)]


def _equal(held: Tensor, value: Tensor) -> bool:
    return held.shape == value.shape and torch.equal(held, value.to(held.device, held.dtype))


def _kind(part: Any) -> str:
    if isinstance(part, LocalPart):
        return "DTensor"
    return "tensor" if isinstance(part, StoredTensor) else type(part).__name__


def _words(part: StoredTensor | LocalPart) -> str:
    words = f"{str(part.dtype).removeprefix('torch.')} {part.shape}"
    if isinstance(part, StoredTensor):
        return words
    places = [
        p.kind + (f"({p.state['dim']})" if isinstance(p.state, dict) and "dim" in p.state else "")
        for p in part.placements
    ]
    return f"{words} {', '.join(places)}"
