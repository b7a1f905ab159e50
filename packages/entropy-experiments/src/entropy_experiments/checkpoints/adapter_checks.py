"""What an adapter_config.json may say, checked before peft acts upon it.

peft takes any value: `use_rslora: "false"` is true to it and another scale, a megatron config
imports the module it names, a pattern of 40 characters may run for ever, and a rank of 10**9 is
made before anybody looks at the file. Here every key that changes the adapter has its kind, modules
are never imported, patterns have a time limit, and ranks are held against the stored tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from entropy_experiments.input_errors import InputError, short, time_limit

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

Rule = tuple[Callable[[Any], bool], str]


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


def check_patterns(path: Path, config: Mapping[str, Any], modules: Iterable[str]) -> None:
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
    path: Path, config: Mapping[str, Any], file: Path, stored: Mapping[str, tuple[int, ...]]
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
