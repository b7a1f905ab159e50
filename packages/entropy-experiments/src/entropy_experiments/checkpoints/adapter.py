"""A LoRA adapter, read strictly: peft warns about what would change every number, we refuse it.

peft says which tensors a config needs over a given base (rank patterns, rsLoRA, DoRA,
modules_to_save, embeddings and all); the file must hold exactly those. A copy of a frozen embedding
may come along, since peft saves one where the embedding is a target or was resized. After loading,
what the model holds is compared with the file.

The config is checked before peft acts upon it. peft takes any value: `use_rslora: "false"` is true
to it and another scale, a megatron config imports the module it names, a pattern of 40 characters
may run for ever, and a rank of 10**9 is made before anybody looks at the file. Here every key that
changes the adapter has its kind, modules are never imported, patterns have a time limit, and ranks
are held against the stored tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from entropy_experiments.checkpoints.base import check_safetensors
from entropy_experiments.checkpoints.layout import ADAPTER_CONFIG, Layout, read_json
from entropy_experiments.checkpoints.stored_weights import adapter_tensors
from entropy_experiments.checkpoints.torch_files import load_safely
from entropy_experiments.checkpoints.verl_state import adapter_from_names
from entropy_experiments.input_errors import InputError, library_errors, short, time_limit

MOST_KEYS = 500
"""peft has about fifty."""
MOST_LAYERS = 10_000
PATTERN_SECONDS = 2.0
FLAGS = (
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "ensure_weight_tying",
    "inference_mode",
)
STARTS = ("gaussian", "olora", "orthogonal", "pissa")
KEEP_THE_BASE = ("gaussian", "orthogonal")
NEEDS_DATA = ("corda", "eva", "lora_ga", "loftq")
"""Starts that change the base by data or by a quantisation that a checkpoint does not hold."""
PISSA_ROUNDS = re.compile(r"pissa_niter_(\d{1,3})")
REVISION = re.compile(r"(?!.*\.\.)[\w.-]+(?:/[\w.-]+)*")
CORE = "megatron.core"
"""What peft writes into every file, whether or not megatron is used."""
OTHER_ADAPTERS = (
    "arrow_config",
    "velora_config",
    "kasa_config",
    "monteclora_config",
    "lora_ga_config",
    "use_qalora",
    "use_bdlora",
)

AdapterConfig = Mapping[str, Any]
"""The content of adapter_config.json."""
Rule = tuple[Callable[[Any], bool], str]
ALPHA_NOTE = "lora_alpha: nothing in the files records the value that training used"
SKETCH_NOTE = (
    "base: compared with the recorded one by a sketch, which tells another base, not another bit"
)
META_NOTE = (
    "LoRA: lora_train_meta.json holds the rank, and alpha as a whole number; taken as plain LoRA "
    "(no rsLoRA, no alpha of single modules), as verl makes it"
)
BASE_NOTE = "base: adapter_config.json names it, but nothing records the weights that training used"


def adapter_config_file(layout: Layout) -> Path:
    """Where rank and alpha are: adapter_config.json, or what verl keeps of it."""
    return layout.lora_meta or layout.config / ADAPTER_CONFIG


def read_adapter_config(layout: Layout) -> dict[str, Any]:
    """A LoRA's settings, checked; not yet a peft config."""
    path, folder = adapter_config_file(layout), layout.config
    if not path.is_file():
        raise FileNotFoundError(
            f"The weights are an adapter's, and {path} is missing. Expected it there, beside the "
            "shards or in the run's folder: rank and alpha are in it alone, and FSDP trainers do "
            "not save it with SHARDED_STATE_DICT. Write it: "
            f'LoraConfig(...).save_pretrained("{folder}").'
        )
    content = read_json(path)
    if layout.lora_meta is not None:
        content = adapter_from_names(path, content, list(layout.stored or ()))
    config = check_adapter_config(path, content)
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

    options = [field.name for field in fields(LoraConfig) if field.init]
    unset = [key for key in config if key not in options and _is_unset(config[key])]
    unknown = [key for key in config if key not in options and key not in unset]
    if unknown:
        near = get_close_matches(unknown[0], options, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{path} has unknown keys {unknown}.{hint} The installed peft would ignore them: "
            "upgrade peft if a newer one wrote the file, or correct it."
        )
    return {key: value for key, value in config.items() if key not in unset}


def _is_unset(value: Any) -> bool:
    # Not `not value`: a number 0 may well be a setting.
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def load_adapter(base: Any, layout: Layout, config: AdapterConfig) -> Any:
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
    where = adapter_config_file(layout)
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
        # A model is made in fp32; who asks for fp64 gets the doubles afterwards.
        value = value.float() if value.dtype == torch.float64 else value
        if not torch.equal(held[name].detach().to("cpu", value.dtype), value):
            raise ValueError(
                f"{file}: {name} did not arrive in the model as it is in the file. The installed "
                "peft renames or converts it: report this, with the adapter config."
            )
    return model


def adapter_notes(
    config: AdapterConfig,
    *,
    from_meta: bool = False,
    base_saved: bool = False,
    base_compared: bool = False,
    config_recorded: bool = False,
) -> tuple[str, ...]:
    """What the files leave open about an adapter.

    Args:
        config: Of the adapter.
        from_meta: It was made of verl's lora_train_meta.json.
        base_saved: The base's weights came with the adapter, so they are what training used.
        base_compared: The base is compared with a sketch that training recorded.
        config_recorded: The config is compared with the sha256 that training recorded.
    """
    alpha = f"{ALPHA_NOTE} (taken: {config['lora_alpha']:g})"
    notes = [] if config_recorded else [alpha]
    notes += [META_NOTE] if from_meta else []
    if base_saved:
        return tuple(notes)
    notes.append(SKETCH_NOTE if base_compared else BASE_NOTE)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start not in KEEP_THE_BASE:
        notes.append(
            f"init_lora_weights is {start!r}, which changes the base at the start of training; it "
            "is changed again here, as peft does, but the files do not say whether to the same"
        )
    return tuple(notes)


def refuse_random_base(path: Path, config: AdapterConfig) -> None:
    """PiSSA by a randomised SVD subtracts another product from the base each time it is made.

    Of the other starts that change the base, `pissa` (a full SVD) and `olora` (a QR) use no random
    numbers.
    """
    start = config.get("init_lora_weights")
    if isinstance(start, str) and PISSA_ROUNDS.fullmatch(start):
        raise InputError(
            f"{path}: init_lora_weights is {start!r}, which changed the base by a randomised SVD "
            "that cannot be made again. Save the adapter converted to plain LoRA (peft: "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)), or save the base "
            "as training had it, set checkpoint.base to it and init_lora_weights to true."
        )


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


def check_adapter_config(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config as it is, or an error that names the key."""
    if len(config) > MOST_KEYS:
        raise InputError(
            f"{path} has {len(config)} keys; expected the fifty or so that peft writes. Restore "
            "the file."
        )
    if config.get("peft_type") != "LORA":
        return config  # refused by the caller, whatever else it says
    if config.get("megatron_config") is not None:
        raise InputError(
            f"{path}: megatron_config is set; expected null. It would import the module that the "
            "file names, and nothing was imported: merge the adapter into its base with the "
            "program that trained it."
        )
    for key, (fits, expected) in _rules().items():
        value = config.get(key)
        if value is not None and not fits(value):
            raise InputError(
                f"{path}: {key} is {short(repr(value), 80)}; expected {expected}. Restore the "
                "config that training wrote."
            )
    start = config.get("init_lora_weights")
    if start in NEEDS_DATA:
        raise InputError(
            f"{path}: init_lora_weights is {start!r}, which changed the base by what the "
            "checkpoint does not hold. Save the base as training had it, set checkpoint.base to it "
            "and init_lora_weights to true."
        )
    for key in OTHER_ADAPTERS:
        if config.get(key):
            raise InputError(
                f"{path}: {key} is set; expected null or false: such an adapter is more than a "
                "product of two matrices, and cannot be probed yet."
            )
    return config


def check_patterns(path: Path, config: AdapterConfig, modules: Iterable[str]) -> None:
    """Refuse patterns that are none, or that do not end on the names of this model."""
    patterns = [
        (key, config[key], "{}")
        for key in ("target_modules", "exclude_modules")
        if isinstance(config.get(key), str)
    ]
    for key in ("rank_pattern", "alpha_pattern"):
        patterns += [(key, one, r"(.*\.)?({})$") for one in config.get(key) or {}]
    layers = config.get("layers_pattern") or []
    for one in [layers] if isinstance(layers, str) else layers:
        patterns.append(("layers_pattern", one, r"(?:^|.*?\.){}\.(?P<idx>\d+)\."))
    for one in config.get("modules_to_save") or []:
        patterns.append(("modules_to_save", one, r"(^|.*\.){}($|\..*)"))
    names = list(modules)
    for key, pattern, form in patterns:
        what = f"{path}: {key} has the pattern {short(repr(pattern), 80)}, which"
        try:
            compiled = re.compile(form.replace("{}", pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError(
                f"{what} is none ({error}); expected a regular expression. Restore the file."
            ) from error
        with time_limit(PATTERN_SECONDS, f"{what} on the modules of the base", "Simplify it."):
            for name in names:
                compiled.match(name)


def check_ranks(
    path: Path, config: AdapterConfig, file: Path, stored: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse ranks larger than anything the weights have: peft makes them before it compares."""
    largest = max((size for shape in stored.values() for size in shape), default=0)
    ranks = {"r": config["r"], **(config.get("rank_pattern") or {})}
    for key, rank in ranks.items():
        if rank > largest:
            raise InputError(
                f"{path}: the rank of {short(key, 80)!r} is {rank}, but no tensor of {file.name} "
                f"has a side above {largest}. The two files are of different runs: restore the "
                "config that training wrote."
            )


def _rules() -> dict[str, Rule]:
    def words(value: Any) -> bool:
        return isinstance(value, str) or texts(value)

    def texts(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    def wholes(value: Any) -> bool:
        return isinstance(value, list) and all(map(whole, value))

    def dropout(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1

    def start(value: Any) -> bool:
        if isinstance(value, str):
            return value in (*STARTS, *NEEDS_DATA) or bool(PISSA_ROUNDS.fullmatch(value))
        return isinstance(value, bool)

    def tokens(value: Any) -> bool:
        return wholes(value) or (isinstance(value, dict) and all(map(wholes, value.values())))

    def replication(value: Any) -> bool:
        if not isinstance(value, list):
            return False
        if not all(isinstance(pair, list) and len(pair) == 2 and wholes(pair) for pair in value):
            return False
        return sum(end - begin for begin, end in value) <= MOST_LAYERS

    mapping: Rule = (lambda value: isinstance(value, dict), "an object")
    text: Rule = (lambda value: isinstance(value, str), "text or null")
    flag: Rule = (lambda value: isinstance(value, bool), "true or false")
    return {
        **dict.fromkeys(FLAGS, flag),
        "rank_pattern": mapping,
        "alpha_pattern": mapping,
        "loftq_config": mapping,
        "lora_dropout": (dropout, "a number from 0 up to below 1"),
        "bias": (lambda value: value in ("none", "all", "lora_only"), "none, all or lora_only"),
        "target_modules": (words, "a pattern or a list of names"),
        "exclude_modules": (words, "a pattern, a list of names or null"),
        "layers_pattern": (words, "a name, a list of names or null"),
        "modules_to_save": (texts, "a list of names or null"),
        "target_parameters": (texts, "a list of names or null"),
        "layers_to_transform": (
            lambda value: whole(value) or wholes(value),
            "a number of a layer, a list of them or null",
        ),
        "layer_replication": (replication, f"pairs of layers, {MOST_LAYERS} in all, or null"),
        "trainable_token_indices": (tokens, "token ids, by module or not, or null"),
        "init_lora_weights": (
            start,
            f"true, false or one of {', '.join((*STARTS, *NEEDS_DATA))}",
        ),
        "task_type": (lambda value: value == "CAUSAL_LM", "CAUSAL_LM or null"),
        "megatron_core": (
            lambda value: value == CORE,
            f"{CORE!r}, and no module was imported",
        ),
        "base_model_name_or_path": text,
        "revision": (
            lambda value: isinstance(value, str) and bool(REVISION.fullmatch(value)),
            "a branch, a tag or a commit, or null",
        ),
    }
