"""Weights that FSDP trainers saved by name, put into a model one tensor at a time.

The names are those of the model in memory, so no loader of transformers is asked: the model is made
from its config, and the two lists of names must agree. Of two tied names either may be stored; if
both are, they must be equal. Under a LoRA the names are peft's (`lora_A.weight`, what the Trainer
saves) or the model's own (`lora_A.default.weight`), then perhaps with the base's weights beside
them: those are what training used, and replace what the base's folder holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from entropy_experiments.checkpoints.base import (
    check_finite_weights,
    check_loaded,
    generation_config,
    model_config,
    quiet_transformers,
)
from entropy_experiments.checkpoints.dcp_state import (
    StoredWeights,
    read_sharded_weights,
    without_wrapper_names,
)
from entropy_experiments.checkpoints.layout import MODEL_CONFIG, Layout
from entropy_experiments.checkpoints.rank_shards import RankWeights
from entropy_experiments.checkpoints.sizes import check_size
from entropy_experiments.checkpoints.torch_files import load_safely
from entropy_experiments.checkpoints.verl_folder import is_rank_file
from entropy_experiments.checkpoints.verl_state import read_rank_weights


def read_stored_weights(path: Path) -> Mapping[str, Tensor]:
    """By name: DCP's folder, the ranks' files, or the one that FULL_STATE_DICT writes."""
    if path.is_dir():
        return read_sharded_weights(path)
    if is_rank_file(path):
        return read_rank_weights(path)
    tensors = load_safely(path, mmap=True)
    if not isinstance(tensors, Mapping) or not all(isinstance(v, Tensor) for v in tensors.values()):
        raise ValueError(
            f"{path} does not hold tensors by name; expected the model's state_dict(). Save the "
            "checkpoint again, as Accelerate does."
        )
    named = {without_wrapper_names(name): value for name, value in tensors.items()}
    if len(named) != len(tensors):
        raise ValueError(
            f"{path} holds {len(tensors)} tensors under {len(named)} names once FSDP's wrappers "
            "are taken off; expected each once. Save the state_dict() of one model."
        )
    return named


def shapes_of(stored: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """By name, without reading a tensor of shards."""
    if isinstance(stored, StoredWeights | RankWeights):
        return stored.shapes
    return {name: tuple(value.shape) for name, value in stored.items()}


def load_sharded_causal_lm(
    path: Path,
    config: Any,
    *,
    where: Path | None = None,
    stored: Mapping[str, Tensor] | None = None,
    generation: GenerationConfig | None = None,
    dtype: torch.dtype,
    device_map: Any = None,
) -> Any:
    """The model of `config` with the weights at `path`, which may be `stored` already.

    Nothing is made of a config that describes more than they hold; `where` it is, for the message.
    """
    stored = read_stored_weights(path) if stored is None else stored
    with quiet_transformers():
        file = [path] if path.is_file() and not is_rank_file(path) else ()
        check_size(where or path, config, file, shapes_of(stored))
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    _check_precision(path, model, dtype)
    if generation is not None:
        model.generation_config = generation
    _fill(path, stored, model.state_dict(), list(stored))
    check_finite_weights(path, model)
    return place_on_devices(model, device_map)


def make_causal_lm(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype
) -> tuple[Any, GenerationConfig]:
    """A model of the config in `folder` whose weights are yet to come, and how it generates.

    `shapes`: of those weights; a config that describes more is refused.
    """
    config = model_config(str(folder), shapes=shapes)
    with quiet_transformers():
        check_size(folder / MODEL_CONFIG, config, (), shapes)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    _check_precision(folder, model, dtype)
    return model, generation_config((folder,), config)


def _check_precision(path: Path, model: Any, dtype: torch.dtype) -> None:
    """Some architectures keep modules in fp32; of transformers' loaders, `from_config` does not."""
    kept = {*(model._keep_in_fp32_modules_strict or ())}
    if dtype == torch.float16:
        kept |= {*(model._keep_in_fp32_modules or ())}
    if kept and dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{path}: {type(model).__name__} keeps {', '.join(sorted(kept))} in float32; got "
            f"checkpoint.dtype {str(dtype).removeprefix('torch.')} for the shards of an FSDP "
            "trainer, all of which it would change. Set checkpoint.dtype: float32, or save the "
            "weights as safetensors."
        )


def adapter_tensors(model: Any, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's, under peft's names."""
    names = _pefts_names(model)
    own = {name: names[name] for name in stored if name in names}
    if any("lora_" in name for name in own):
        return {peft_name: stored[name] for name, peft_name in own.items()}
    return {name: stored[name] for name in stored}


def restore_doubles(model: nn.Module, stored: RankWeights) -> None:
    """Numbers that training held in fp64, into a model that was loaded in fp32 and made fp64."""
    into = model.state_dict()
    for name, dtype in stored.dtypes.items():
        if dtype == torch.float64 and name in into:
            stored.copy_into(into[name], name)


def carries_base(layout: Layout) -> bool:
    """Whether a base's weights were saved with its adapter, and its config beside them."""
    if layout.kind != "lora" or layout.hf is None or not (layout.hf / MODEL_CONFIG).is_file():
        return False
    names = layout.stored or ()
    return any("lora_" not in name and ".modules_to_save." not in name for name in names)


def take_base(model: Any, path: Path, stored: Mapping[str, Tensor]) -> bool:
    """Put the base's weights into a PeftModel, if they were saved with the adapter."""
    names = _pefts_names(model)
    if not any("lora_" in name for name in stored if name in names):
        return False
    rest = [name for name in stored if name not in names]
    if rest:
        base = {name: value for name, value in model.state_dict().items() if name not in names}
        _fill(path, stored, base, rest)
        check_finite_weights(path, model)
    return bool(rest)


def _pefts_names(model: Any) -> dict[str, str]:
    """{the model's own name: peft's} of all that the adapter needs: the same memory."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    places = {_place(value): name for name, value in state.items()}
    held = model.state_dict()
    return {name: places[_place(v)] for name, v in held.items() if _place(v) in places}


def _fill(
    path: Path, stored: Mapping[str, Tensor], into: Mapping[str, Tensor], names: Collection[str]
) -> None:
    covered = {_place(into[name]) for name in names if name in into}
    extra = [name for name in names if name not in into]
    missing = [name for name, value in into.items() if _place(value) not in covered]
    info = {"missing_keys": missing, "unexpected_keys": extra, "mismatched_keys": []}
    check_loaded(path, info, extra_allowed=False)
    filled: set[Any] = set()
    shapes = shapes_of(stored)
    for name in names:
        target = into[name]
        if shapes[name] != tuple(target.shape):
            info["mismatched_keys"] = [(name, shapes[name], target.shape)]
            check_loaded(path, info, extra_allowed=False)
        if _place(target) not in filled:
            _copy(stored, name, target)
            filled.add(_place(target))
        elif not _agrees(stored, name, target):
            raise ValueError(
                f"{path}: {name!r} differs from the parameter that it is tied to in this model; "
                "expected the same numbers. Training did not tie them: set tie_word_embeddings to "
                "false in config.json."
            )


def _copy(stored: Mapping[str, Tensor], name: str, target: Tensor) -> None:
    if isinstance(stored, RankWeights):
        stored.copy_into(target, name)
    else:
        target.copy_(stored[name])


def _agrees(stored: Mapping[str, Tensor], name: str, target: Tensor) -> bool:
    if isinstance(stored, RankWeights):
        return stored.agrees(target, name)
    return torch.equal(target, stored[name].to(target.device, target.dtype))


def _place(value: Tensor) -> tuple[Any, ...]:
    return value.device, value.data_ptr(), value.shape


def place_on_devices(model: nn.Module, device_map: Any) -> Any:
    if device_map is None:
        return model
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if isinstance(device_map, Mapping):
        return dispatch_model(model, dict(device_map))
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        unsplit = list(model._no_split_modules or ())  # type: ignore[arg-type]
        room = None
        if device_map != "sequential":
            room = get_balanced_memory(
                model, no_split_module_classes=unsplit, low_zero=device_map == "balanced_low_0"
            )
        placement = infer_auto_device_map(model, max_memory=room, no_split_module_classes=unsplit)
        return dispatch_model(model, placement)
    return model.to(device_map)
