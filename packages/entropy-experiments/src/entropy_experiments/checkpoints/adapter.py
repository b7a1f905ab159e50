"""A LoRA adapter, read strictly: peft warns about what would change every number, we refuse it.

peft says which tensors a config needs over a given base (rank patterns, rsLoRA, DoRA,
modules_to_save, embeddings and all); the file must hold exactly those. A copy of a frozen embedding
may come along, since peft saves one where the embedding is a target or was resized. After loading,
what the model holds is compared with the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from entropy_experiments.checkpoints.adapter_checks import (
    check_adapter_config,
    check_patterns,
    check_ranks,
)
from entropy_experiments.checkpoints.base import check_safetensors
from entropy_experiments.checkpoints.layout import ADAPTER_CONFIG, Layout, read_json
from entropy_experiments.checkpoints.optimizer_state import load_safely
from entropy_experiments.checkpoints.stored_weights import adapter_tensors
from entropy_experiments.input_errors import library_errors

ALPHA_NOTE = "lora_alpha: nothing in the files records the value that training used"
SKETCH_NOTE = (
    "base: compared with the recorded one by a sketch, which tells another base, not another bit"
)
BASE_NOTE = "base: adapter_config.json names it, but nothing records the weights that training used"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json, checked; not yet a peft config."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"The weights are an adapter's, and {path} is missing. Expected it there, beside the "
            "shards or in the run's folder: rank and alpha are in it alone, and FSDP trainers do "
            "not save it with SHARDED_STATE_DICT. Write it: "
            f'LoraConfig(...).save_pretrained("{folder}").'
        )
    config = check_adapter_config(path, read_json(path))
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"{path}: peft_type is {kind!r}; expected 'LORA'. Other adapters cannot be probed yet: "
            "merge it into its base and give the result as a full checkpoint."
        )
    config = _without_unset_options(path, config)
    for key in ("r", "lora_alpha"):
        _positive(path, key, config.get(key), whole=key == "r")
    for key in ("rank_pattern", "alpha_pattern"):
        for module, value in (config.get(key) or {}).items():
            _positive(path, f"{key}[{module!r}]", value, whole=key == "rank_pattern")
    if config.get("alora_invocation_tokens"):
        raise ValueError(
            f"{path}: alora_invocation_tokens is set; an activated LoRA changes within a sequence "
            "and cannot be probed. Expected it to be null."
        )
    return config


def _without_unset_options(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """`config` without the keys that the installed peft does not know and that switch nothing on.

    peft writes every option of its own version, used or not: null, false or empty is an option of a
    newer peft that training did not use. Any other value changes the adapter: refused.
    """
    from peft import LoraConfig

    known = [field.name for field in fields(LoraConfig) if field.init]
    unset = [key for key in config if key not in known and _is_unset(config[key])]
    unknown = [key for key in config if key not in known and key not in unset]
    if unknown:
        near = get_close_matches(unknown[0], known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{path} has unknown keys {unknown}.{hint} The installed peft would ignore them: "
            "upgrade peft if a newer one wrote the file, or correct it."
        )
    return {key: value for key, value in config.items() if key not in unset}


def _is_unset(value: Any) -> bool:
    # Not `not value`: a number 0 may well be a setting.
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def load_adapter(base: Any, layout: Layout, config: Mapping[str, Any]) -> Any:
    """A PeftModel over `base` whose trainable parameters are those that training moved."""
    from peft import (
        LoraConfig,
        get_peft_model,
        get_peft_model_state_dict,
        set_peft_model_state_dict,
    )

    # `inference_mode` is what peft writes when it saves; it would freeze the adapter. The base was
    # found already, wherever it is.
    changes = {"inference_mode": False, "base_model_name_or_path": base.name_or_path}
    file = layout.files[0] if layout.sharded is None else layout.sharded
    where = layout.config / ADAPTER_CONFIG
    check_patterns(where, config, (name for name, _ in base.named_modules()))
    stored = _tensors(file) if layout.stored is None else None
    if stored is not None:
        shapes = {name: tuple(x.shape) for name, x in stored.items()}
        check_ranks(where, config, file, shapes)
    with library_errors(
        f"peft cannot put the adapter of {where} on the base {base.name_or_path}",
        "Expected the base that it was trained on (checkpoint.base) and the config that training "
        "wrote.",
    ):
        model = get_peft_model(base, LoraConfig(**{**config, **changes}))
    if stored is None:
        assert layout.stored is not None
        stored = adapter_tensors(model, layout.stored)
    _check_finite(file, stored)
    needed = get_peft_model_state_dict(model, save_embedding_layers=False)
    copies = get_peft_model_state_dict(model, save_embedding_layers=True)
    _compare(file, stored, needed, copies)
    set_peft_model_state_dict(model, dict(stored))  # peft 0.18 renames keys in what it is given
    held = get_peft_model_state_dict(model, save_embedding_layers=True)
    for name, value in stored.items():
        if not torch.equal(held[name].detach().to("cpu", value.dtype), value):
            raise ValueError(
                f"{file}: {name} did not arrive in the model as it is in the file. The installed "
                "peft renames or converts it: report this, with the adapter config."
            )
    return model


def adapter_notes(
    config: Mapping[str, Any],
    *,
    base_saved: bool = False,
    base_compared: bool = False,
    config_recorded: bool = False,
) -> tuple[str, ...]:
    """What the files leave open about an adapter.

    Args:
        config: Of the adapter.
        base_saved: The base's weights came with the adapter, so they are what training used.
        base_compared: The base is compared with a sketch that training recorded.
        config_recorded: The config is compared with the sha256 that training recorded.
    """
    alpha = f"{ALPHA_NOTE} (taken: {config['lora_alpha']:g})"
    notes = [] if config_recorded else [alpha]
    if base_saved:
        return tuple(notes)
    notes.append(SKETCH_NOTE if base_compared else BASE_NOTE)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start != "gaussian":
        notes.append(
            f"init_lora_weights is {start!r}, which changes the base at the start of training; it "
            "is changed again here, as peft does, but the files do not say whether to the same"
        )
    return tuple(notes)


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        check_safetensors([file])
        stored = load_file(file)
        odd = [name for name, value in stored.items() if not _is_a_weight(value)]
        if odd:
            raise ValueError(
                f"{file}: tensor {odd[0]!r} has dtype {stored[odd[0]].dtype}; expected float32, "
                "bfloat16, float16 or float64. Save the adapter again in one of them."
            )
    else:
        stored = load_safely(file)
        if not isinstance(stored, Mapping) or not all(
            isinstance(value, Tensor) for value in stored.values()
        ):
            raise ValueError(f"{file} does not hold tensors by name. Save the adapter again.")
        stored = dict(stored)
    return stored


def _is_a_weight(value: Tensor) -> bool:
    return value.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check_finite(file: Path, stored: Mapping[str, Tensor]) -> None:
    for name, value in stored.items():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(
                f"{file}: tensor {name!r} has {int((~torch.isfinite(value)).sum())} non-finite "
                f"values of {value.numel()}; expected finite numbers. Training diverged or the "
                "file is damaged: use an earlier checkpoint."
            )


def _compare(
    file: Path,
    stored: Mapping[str, Tensor],
    needed: Mapping[str, Tensor],
    copies: Mapping[str, Tensor],
) -> None:
    missing = sorted(set(needed) - set(stored))
    extra = sorted(set(stored) - set(needed) - set(copies))
    if missing or extra:
        raise ValueError(
            f"{file} does not fit {ADAPTER_CONFIG}: missing tensors {missing[:4]} ({len(missing)} "
            f"in all), extra tensors {extra[:4]} ({len(extra)} in all). Expected exactly what "
            "target_modules, rank_pattern and modules_to_save ask for: the two files are of "
            "different runs, or the base is another model (checkpoint.base)."
        )
    for name, value in stored.items():
        expected = needed[name] if name in needed else copies[name]
        if value.shape != expected.shape:
            raise ValueError(
                f"{file}: {name} has shape {tuple(value.shape)}; expected {tuple(expected.shape)} "
                f"from r in {ADAPTER_CONFIG} and the base's sizes. The rank is another one, or the "
                "base is another model or has another vocabulary (checkpoint.base)."
            )


def _positive(path: Path, key: str, value: Any, *, whole: bool) -> None:
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not (isfinite(value) and value > 0):
        got = "missing" if value is None else repr(value)
        raise ValueError(
            f"{path}: {key} is {got}; expected a positive {'integer' if whole else 'number'}. The "
            "adapter's scale is lora_alpha / r: restore the config that training wrote."
        )
