"""verl's and SkyRL's checkpoint files, written by one process that is every rank in its turn.

torch's own DTensors under torch's fake process group: the pickles are those that FSDP2 ranks write
(tests/wild has verl's own manager on real ranks). A part is cut out of a padded buffer, as FSDP2
keeps it, so the storage in the file is longer than the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from oracles.tiny_models import LORA, tiny_lora, tiny_model, tiny_tokenizer, train_a_little

Cut = Callable[[Tensor], Tensor]


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def cut_by(mesh: DeviceMesh, placements: Sequence[Any] = (Shard(0),)) -> Cut:
    """The part that this rank holds of a tensor, as a DTensor."""

    def cut(whole: Tensor) -> Tensor:
        local = whole.detach()
        for dimension, placement in enumerate(placements):
            if isinstance(placement, Shard):
                size, at = mesh.size(dimension), mesh.get_coordinate()[dimension]  # type: ignore[index]
                n = local.shape[placement.dim]
                chunk = -(-n // size)
                start = min(at * chunk, n)
                rows = min(chunk, n - start)
                local = local.narrow(placement.dim, start, rows)
                padding = list(local.shape)
                padding[placement.dim] = chunk
                padded = torch.zeros(padding, dtype=local.dtype)
                padded.narrow(placement.dim, 0, rows).copy_(local)
                local = padded.narrow(placement.dim, 0, rows)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    return cut


def write_ranks(
    folder: Path,
    content: Callable[[Cut, int], Mapping[str, Any]],
    *,
    size: int,
    part: str = "model",
    mesh_shape: tuple[int, ...] | None = None,
    placements: Sequence[Any] = (Shard(0),),
) -> None:
    """`content(cut, rank)` into every rank's file of a part."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = mesh_shape or (size,)
    names = ("fsdp",) if len(shape) == 1 else ("ddp", "fsdp")
    for rank in range(size):
        with as_rank(rank, size):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            tree = content(cut_by(mesh, placements), rank)
            torch.save(tree, folder / f"{part}_world_size_{size}_rank_{rank}.pt")


@dataclass(frozen=True, kw_only=True)
class RankCheckpoint:
    """What was saved, still alive."""

    path: Path
    """global_step_3."""
    shards: Path
    model: Any
    optimizer: torch.optim.Optimizer


def save_rank_checkpoint(
    run: Path,
    kind: str = "full",
    *,
    size: int = 2,
    writer: str = "verl",
    double: bool = False,
    architecture: str = "qwen2",
    mesh_shape: tuple[int, ...] | None = None,
    placements: Sequence[Any] = (Shard(0),),
) -> RankCheckpoint:
    """A tiny model after three AdamW steps, as verl 0.9 or SkyRL 0.3 save it from `size` ranks.

    The optimizer has every parameter, frozen ones too, as verl's has.
    """
    model: Any = tiny_lora(architecture) if kind == "lora" else tiny_model(architecture)
    if double:
        model = model.double()
    moved = train_a_little(model, grouped=False)
    everything = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    everything.state.update(moved.state)
    step = run / "global_step_3"
    folder = step / ("actor" if writer == "verl" else "policy")
    cuts: dict[str, Any] = {"size": size, "mesh_shape": mesh_shape, "placements": placements}
    write_ranks(
        folder,
        lambda cut, _: {name: cut(value) for name, value in model.state_dict().items()},
        **cuts,
    )
    write_ranks(
        folder, lambda cut, _: _cut_state(everything.state_dict(), cut), part="optim", **cuts
    )
    for rank in range(size):
        extra = {"lr_scheduler": None, "rng": {"cpu": torch.get_rng_state()}}
        torch.save(extra, folder / f"extra_state_world_size_{size}_rank_{rank}.pt")
    _write_beside(folder, model, kind, writer, size)
    return RankCheckpoint(path=step, shards=folder, model=model, optimizer=moved)


def _cut_state(state: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """`step` is not cut."""
    entries = {
        key: {what: value if what == "step" else cut(value) for what, value in entry.items()}
        for key, entry in state["state"].items()
    }
    return {"state": entries, "param_groups": state["param_groups"]}


def _write_beside(folder: Path, model: Any, kind: str, writer: str, size: int) -> None:
    model.config.save_pretrained(folder / "huggingface")
    tiny_tokenizer().save_pretrained(folder / "huggingface")
    about = {"FSDP_version": 2} if writer == "verl" else {"fsdp_strategy": "fsdp2"}
    (folder / "fsdp_config.json").write_text(json.dumps({**about, "world_size": size}))
    if kind != "lora":
        return
    if writer == "verl":
        meta = {"r": LORA["r"], "lora_alpha": LORA["lora_alpha"], "task_type": "CAUSAL_LM"}
        (folder / "lora_train_meta.json").write_text(json.dumps(meta))
    else:
        model.peft_config["default"].save_pretrained(folder / "lora_adapter")


REPLICATED = (Replicate(), Shard(0))
"""Of a mesh (copies, parts): hybrid sharding."""
