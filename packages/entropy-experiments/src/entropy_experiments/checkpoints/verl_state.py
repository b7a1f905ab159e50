"""The model, the optimizer and the LoRA of a verl or SkyRL checkpoint, by name.

verl saves `model.state_dict()` and `optimizer.state_dict()` of each rank. The optimizer was made of
`module.parameters()`, frozen ones included, and its state is keyed by their positions; moments are
cut as the parameters are, `step` and the groups are the same on every rank. verl 0.9 keeps of a
LoRA's config rank and alpha alone: which modules it adapts is in the names of the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropy_experiments.checkpoints.dcp_state import without_wrapper_names
from entropy_experiments.checkpoints.inert_pickle import Record
from entropy_experiments.checkpoints.rank_shards import (
    LEAVES,
    RankFiles,
    RankWeights,
    read_rank_files,
    refuse_other_names,
)
from entropy_experiments.checkpoints.torch_contents import StoredTensor, TorchContents
from entropy_experiments.checkpoints.verl_folder import refusal_of_fsdp1
from entropy_experiments.input_errors import short

PEFT = "base_model.model."
ADAPTED = (".lora_A.", ".lora_embedding_A.")
SAVED = ".modules_to_save."
FSDP1 = "ShardedTensor"


def read_rank_weights(path: Path) -> RankWeights:
    """The model's tensors by name; `path`: the file of any rank.

    Raises:
        ValueError: If a file holds anything else, or the ranks hold different names.
    """
    files = read_rank_files(path)
    for one in files.ranks:
        if not isinstance(one.tree, Mapping) or not one.tree:
            raise ValueError(
                f"{one.path} holds a {type(one.tree).__name__}; expected the tensors of a "
                "model by name, at least one. Use another checkpoint."
            )
        for name, value in one.tree.items():
            if isinstance(value, Record) and value.kind == FSDP1:
                raise refusal_of_fsdp1(files.folder, f"{name!r} is a {FSDP1}")
            if not isinstance(name, str) or not isinstance(value, LEAVES):
                raise ValueError(
                    f"{one.path}: {short(name, 80)!r} is a {_kind(value)}; expected tensors by "
                    "name, as FSDP2's state_dict() has them. Use another checkpoint."
                )
    refuse_other_names(files, "tensors", [list(tree) for tree in files.trees])
    keys: dict[str, str] = {}
    for key in files.trees[0]:
        name = without_wrapper_names(key)
        if name in keys:
            raise ValueError(
                f"{files.ranks[0].path} holds {keys[name]!r} and {key!r}, one name once wrappers "
                "are taken off; expected each tensor once. Save the state_dict() of one model."
            )
        keys[name] = key
    return RankWeights(files, keys)


def read_rank_optimizer(path: Path) -> dict[str, Any]:
    """`state` and `param_groups`, as torch.save(optimizer.state_dict()) of one process has them.

    Args:
        path: The file of any rank.
    """
    files = read_rank_files(path)
    for one in files.ranks:
        if not isinstance(one.tree, Mapping) or not {"state", "param_groups"} <= set(one.tree):
            keys = sorted(map(str, one.tree))[:6] if isinstance(one.tree, Mapping) else "no mapping"
            raise ValueError(
                f"{one.path} is not an optimizer's state: got {keys}; expected 'state' and "
                "'param_groups'. The run saved none (SkyRL writes an empty file then): add the "
                "optimizer to what the trainer saves."
            )
        if not isinstance(one.tree["state"], Mapping):
            raise ValueError(f"{one.path}: state is a {_kind(one.tree['state'])}, not a mapping.")
    states = [tree["state"] for tree in files.trees]
    refuse_other_names(files, "parameters", [list(state) for state in states])
    return {
        "state": {key: _entry(files, key, [state[key] for state in states]) for key in states[0]},
        "param_groups": _groups(files),
    }


def _entry(files: RankFiles, key: Any, entries: list[Any]) -> dict[str, Any]:
    """The moments of one parameter."""
    for one, entry in zip(files.ranks, entries, strict=True):
        if not isinstance(entry, Mapping):
            raise ValueError(f"{one.path}: the state of parameter {key!r} is a {_kind(entry)}.")
    refuse_other_names(files, f"moments of parameter {key!r}", [list(entry) for entry in entries])
    moments: dict[str, Any] = {}
    for what in entries[0]:
        parts = [entry[what] for entry in entries]
        name = f"{what} of parameter {key}"
        if isinstance(parts[0], LEAVES):
            moments[what] = files.tensor(name, parts)
        else:
            _refuse_unequal(files, name, parts)
            moments[what] = parts[0]
    return moments


def _groups(files: RankFiles) -> Any:
    groups = [_plain(one, one.tree["param_groups"]) for one in files.ranks]
    _refuse_unequal(files, "param_groups", groups)
    return groups[0]


def _refuse_unequal(files: RankFiles, what: str, values: list[Any]) -> None:
    for one, value in zip(files.ranks, values, strict=True):
        if value != values[0]:
            raise ValueError(
                f"{one.path}: {what} is {short(value, 120)}; expected {short(values[0], 120)}, as "
                "on rank 0. The files are of different saves: use another checkpoint."
            )


def _plain(contents: TorchContents, value: Any) -> Any:
    """Settings as Python has them; a rate may be a tensor of one number."""
    if isinstance(value, Mapping):
        return {key: _plain(contents, one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(contents, one) for one in value)
    if isinstance(value, StoredTensor):
        return contents.tensor(value).tolist()
    if isinstance(value, (*LEAVES, Record)):
        raise ValueError(
            f"{contents.path}: a parameter group has a {_kind(value)}; expected plain settings. "
            "Use another checkpoint."
        )
    return value


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, Record) else type(value).__name__


def adapter_from_names(path: Path, meta: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """peft's config of a LoRA: rank and alpha of `meta`, its modules by the tensors' names.

    Args:
        path: lora_train_meta.json, for messages.
        meta: Its content.
        names: Of the stored tensors.
    """
    unknown = sorted(set(meta) - {"r", "lora_alpha", "task_type"})
    if unknown:
        raise ValueError(
            f"{path} has the keys {unknown}; expected r, lora_alpha and task_type, as verl 0.9 "
            "writes them. A newer verl wrote it: put adapter_config.json into lora_adapter/."
        )
    own = [name.removeprefix(PEFT) for name in names]
    modules = {name.split(mark)[0] for name in own for mark in ADAPTED if mark in name}
    saved = {name.split(SAVED)[0] for name in own if SAVED in name}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": meta.get("task_type"),
        "r": meta.get("r"),
        "lora_alpha": meta.get("lora_alpha"),
        "target_modules": sorted(modules),
        "bias": "none",
    }
    return config | ({"modules_to_save": sorted(saved)} if saved else {})
