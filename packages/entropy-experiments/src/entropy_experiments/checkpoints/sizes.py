"""How large a model a config describes, before anything of it is made.

A config.json of 800 bytes may ask for more memory than there is, or for more layers than can be
counted. The weights say how large the model is: no layer is without a tensor, and no parameter
without a number in a file. So the raw config is held against the headers of the files (of FSDP's
shards: against their table of contents), then the model is made without memory (torch's meta
device) and its parameters are counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from entropy_experiments.input_errors import InputError, read_json_value

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
MOST_LABELS = 100_000
"""transformers makes a name for each when it reads a config."""
KERNEL_KEYS = ("_attn_implementation", "attn_implementation", "_attn_implementation_internal")
ROOM = 2.0
"""Times the numbers in the files: tied weights may be stored once, and what is missing or has
another shape is refused by name once the model is there."""
LARGEST_HEADER = 100 * 2**20
"""Bytes; safetensors' own limit."""


Shapes = Mapping[str, tuple[int, ...]]


def read_tensor_shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]] | None:
    """Shapes by name from the headers of safetensors files alone; None if others are among them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if file.suffix != ".safetensors" or not file.is_file():
            return None
        with file.open("rb") as held:
            length = int.from_bytes(held.read(8), "little")
            if length > LARGEST_HEADER:
                return None  # refused, by name, by the library's own reader
            try:
                header = json.loads(held.read(length))
                header.pop("__metadata__", None)
                shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return None  # as above
    return shapes or None


def check_config_file(file: Path, files: Sequence[Path] = (), shapes: Shapes | None = None) -> None:
    """Refuse a config.json that names code on a hub, or would keep its reader busy for ever.

    `shapes`: of the weights by name, where they are in no safetensors files.
    """
    if not file.is_file():
        return
    content = read_json_value(file)
    if not isinstance(content, dict):
        raise InputError(
            f"{file} holds a {type(content).__name__}; expected a JSON object. Restore the file."
        )
    tensors = read_tensor_shapes(files) if shapes is None else shapes
    for part in _objects(content):
        for key in KERNEL_KEYS:
            name = part.get(key)
            if isinstance(name, str) and "/" in name:
                raise InputError(
                    f"{file}: {key} is {name!r}, code on a hub; expected 'sdpa', 'eager' or none, "
                    "and nothing was loaded. Take the key out of the file."
                )
        labels = part.get("num_labels")
        if isinstance(labels, int) and labels > MOST_LABELS:
            raise InputError(
                f"{file}: num_labels is {labels}; expected at most {MOST_LABELS}, and a language "
                "model needs none. Take the key out of the file."
            )
        for key in LAYER_KEYS:
            layers = part.get(key)
            if tensors and isinstance(layers, int) and layers > len(tensors):
                raise InputError(
                    f"{file}: {key} is {layers}, but the weights beside it have {len(tensors)} "
                    "tensors in all; expected at least one for each layer. The file belongs to "
                    "another model, or was edited: restore it."
                )


def check_size(
    where: Path, config: Any, files: Sequence[Path] = (), shapes: Shapes | None = None
) -> None:
    """Refuse a config whose model has more parameters than the files have numbers.

    `where`: its config.json, for the message; `shapes` as above. Quantised weights are packed, and
    not compared.
    """
    if not (files or shapes) or getattr(config, "quantization_config", None) is not None:
        return
    tensors = read_tensor_shapes(files) if shapes is None else shapes
    held = sum(file.stat().st_size for file in files)
    if tensors is not None:
        numbers = sum(map(prod, tensors.values()))
        # A pickled tensor may repeat one number without end: no more than there are bytes.
        held = numbers if shapes is None or not files else min(numbers, held)
    needed = _parameters(config)
    if needed is None:
        return
    if needed > ROOM * held:
        raise InputError(
            f"{where} describes a model of {needed:,} parameters; the weights beside it hold "
            f"{held:,} numbers. Nothing of it was made: restore the config.json that the weights "
            "came with."
        )


def _parameters(config: Any) -> int | None:
    """Numbers in the model of a config; None if it cannot be made without memory.

    transformers makes every model so before it loads weights: what is wrong with the config is said
    there, and an architecture that needs true numbers in its constructor is loaded all the same.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # a library's, about the config: see above
        return None
    return sum({id(p): p.numel() for p in model.parameters()}.values())


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every JSON object in a value, itself included."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            yield one
            rest += one.values()
        elif isinstance(one, list):
            rest += one
