"""A tiny model under FSDP on gloo ranks, saved by Accelerate's own functions and by dcp.save.

Beside each sharded checkpoint goes the ordinary one of the same tensors, gathered: what is read
from the shards must be that, bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from oracles.tiny_models import tiny_lora, tiny_model, tiny_tokenizer, train_a_little

SIZES = {"intermediate_size": 45, "num_key_value_heads": 2}
RANK = 3
"""The rows of the MLP and of LoRA's first halves fall unevenly on two ranks."""


def save_sharded(folder: str, kind: str) -> list[str]:
    """On every rank: train for a moment and save in every form; what was saved."""
    PartialState(cpu=True)  # which Accelerate's logger asks for
    out = Path(folder)
    plain = tiny_model("llama", **SIZES)
    if kind == "lora" and dist.get_rank() == 0:
        plain.save_pretrained(out / "base")
        tiny_tokenizer().save_pretrained(out / "base")
    model: Any = tiny_lora(base=plain, r=RANK) if kind == "lora" else plain
    layers = model.base_model.model.model.layers if kind == "lora" else model.model.layers
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = train_a_little(model, grouped=True)
    _ordinary(out, model, optimizer, kind)
    for name, form in (("accelerate", "SHARDED_STATE_DICT"), ("full", "FULL_STATE_DICT")):
        _by_accelerate(out / name / "checkpoint-3", model, optimizer, form)
    if kind == "lora":
        _by_accelerate(
            out / "trainer" / "checkpoint-3",
            model,
            optimizer,
            "SHARDED_STATE_DICT",
            adapter_only=True,
        )
    weights, moments = get_state_dict(model, optimizer)
    save({"app": {"model": weights, "optim": moments}}, checkpoint_id=out / "dcp" / "step_3")
    _beside(out / "dcp" / "step_3", model, kind)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = get_optimizer_state_dict(model, optimizer, options=flat)
    both = {**weights, **flattened} if kind == "full" else {"model": weights, "optim": flattened}
    save(both, checkpoint_id=out / "flat" / "step_3")
    _beside(out / "flat" / "step_3", model, kind)
    if kind == "full":
        _by_the_first_fsdp(out / "fsdp1" / "checkpoint-3")
    return ["accelerate", "full", "dcp", "flat", "trainer" if kind == "lora" else "fsdp1"]


def _by_the_first_fsdp(folder: Path) -> None:
    """The same training under FullyShardedDataParallel, which shards flat parameters."""
    plain = tiny_model("llama", **SIZES)
    layers = {type(layer) for layer in plain.model.layers}
    model = FullyShardedDataParallel(
        plain,
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy(layers),
        device_id=torch.device("cpu"),
    )
    optimizer = train_a_little(model, grouped=True)
    _by_accelerate(folder, model, optimizer, "SHARDED_STATE_DICT", version=1)


def _by_accelerate(
    folder: Path,
    model: Any,
    optimizer: Any,
    form: str,
    *,
    adapter_only: bool = False,
    version: int = 2,
) -> None:
    plugin: Any = SimpleNamespace(
        fsdp_version=version,
        state_dict_type=StateDictType[form],
        state_dict_config=SimpleNamespace(offload_to_cpu=False, rank0_only=False),
        optim_state_dict_config=None,
    )
    if version == 1:
        plugin.state_dict_config = ShardedStateDictConfig()
        plugin.optim_state_dict_config = ShardedOptimStateDictConfig()
    ranks: Any = SimpleNamespace(
        num_processes=dist.get_world_size(), process_index=dist.get_rank(), is_fsdp2=version == 2
    )
    save_fsdp_model(plugin, ranks, model, folder, adapter_only=adapter_only)
    save_fsdp_optimizer(plugin, ranks, optimizer, model, folder)
    _beside(folder, model, "lora" if hasattr(model, "peft_config") else "full")


def _beside(folder: Path, model: Any, kind: str) -> None:
    """What people have to put there: the config; and what the Trainer writes last."""
    if dist.get_rank() == 0:
        if kind == "lora":
            _adapter_config(folder, model)
        else:
            model.config.save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    dist.barrier()


def _adapter_config(folder: Path, model: Any) -> None:
    model.peft_config["default"].save_pretrained(folder)
    path = folder / "adapter_config.json"
    written = json.loads(path.read_text())
    written["base_model_name_or_path"] = "../../base"
    path.write_text(json.dumps(written))


def _ordinary(out: Path, model: Any, optimizer: Any, kind: str) -> None:
    """The same tensors, gathered: safetensors and optimizer.pt."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    moments = get_optimizer_state_dict(model, optimizer, options=whole)
    if dist.get_rank() == 0:
        folder = out / "ordinary" / "checkpoint-3"
        folder.mkdir(parents=True)
        if kind == "lora":
            from peft import get_peft_model_state_dict
            from safetensors.torch import save_file

            tensors = get_peft_model_state_dict(model, weights, save_embedding_layers=False)
            save_file(tensors, folder / "adapter_model.safetensors")
        else:
            plain = tiny_model("llama", **SIZES)
            plain.load_state_dict(weights)
            plain.save_pretrained(folder)
        torch.save(moments, folder / "optimizer.pt")
        _beside_alone(folder, model, kind)
    dist.barrier()


def _beside_alone(folder: Path, model: Any, kind: str) -> None:
    if kind == "lora":
        _adapter_config(folder, model)
    else:
        tiny_tokenizer().save_pretrained(folder)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
