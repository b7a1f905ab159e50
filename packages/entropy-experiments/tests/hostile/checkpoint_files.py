"""Hostile checkpoints: configs, tokenizer, weights, optimizer, the trainer's state."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.harness import Box, Cases, edit_json, probe
from hostile.mutations import (
    BACKTRACKING,
    ESCAPES,
    deep,
    long_integer,
    mutate_bytes,
    mutate_json,
)

MODEL = Cases("model config")
ADAPTER = Cases("adapter config")
TOKENIZER = Cases("tokenizer")
WEIGHTS = Cases("weights")
OPTIMIZER = Cases("optimizer")
STATE = Cases("trainer state")


# --- config.json ---------------------------------------------------------------------------------


def model(**changes: Any) -> Callable[[Box], list[str]]:
    """The base's config.json with other values."""

    def make(box: Box) -> list[str]:
        box.lora()
        edit_json(box.base / "config.json", **changes)
        return probe(box)

    return make


def model_text(content: str | bytes) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        box.lora()
        box.write("run/base/config.json", content)
        return probe(box)

    return make


REFUSED: dict[str, Any] = {"ends": (2,), "names": ("run/base",)}
for name, changes in {
    "hidden_size huge": {"hidden_size": 10**9},
    "vocab_size huge": {"vocab_size": 10**12},
    "intermediate_size huge": {"intermediate_size": 10**10},
    "ten million layers": {"num_hidden_layers": 10**7, "layer_types": ...},
    "hidden_size beyond int64": {"hidden_size": 10**30},
    "hidden_size negative": {"hidden_size": -96},
    "hidden_size zero": {"hidden_size": 0},
    "hidden_size text": {"hidden_size": "96"},
    "hidden_size null": {"hidden_size": None},
    "hidden_size a fraction": {"hidden_size": 96.5},
    "hidden_size NaN": {"hidden_size": float("nan")},
    "vocab_size negative": {"vocab_size": -1},
    "no layers": {"num_hidden_layers": 0, "layer_types": []},
    "heads zero": {"num_attention_heads": 0},
    "heads seven": {"num_attention_heads": 7},
    "key value heads zero": {"num_key_value_heads": 0},
    "key value heads three": {"num_key_value_heads": 3},
    "layer_types too short": {"layer_types": ["full_attention"]},
    "layer_types unknown": {"layer_types": ["x"] * 4},
    "layer_types a number": {"layer_types": 4},
    "rope type unknown": {"rope_parameters": {"rope_type": "x"}},
    "rope a list": {"rope_parameters": [1]},
    "rope factor missing": {"rope_parameters": {"rope_type": "yarn"}},
    "activation unknown": {"hidden_act": "__import__('os')"},
    "activation a list": {"hidden_act": ["silu"]},
    "dtype unknown": {"dtype": "floaty"},
    "dtype a module": {"dtype": "os"},
    "model_type unknown": {"model_type": "nobody_knows"},
    "model_type missing": {"model_type": ..., "architectures": ["X"]},
    "model_type a number": {"model_type": 5},
    "model_type escapes": {"model_type": ESCAPES},
    "model_type a surrogate": {"model_type": "\ud800"},
    "untied without a head": {"tie_word_embeddings": False},
    "padding outside": {"pad_token_id": 10**6},
    "an encoder": {"model_type": "vit"},
    "another family": {"model_type": "gpt2"},
    "attention unknown": {"_attn_implementation": "nonsense"},
    "quantised fp8": {"quantization_config": {"quant_method": "fp8"}},
    "quantised nobody knows how": {"quantization_config": {"quant_method": "x"}},
    "quantised by a list": {"quantization_config": [4]},
}.items():
    MODEL.add(name, model(**changes), **{**REFUSED, "quick": name.startswith("hidden_size huge")})
for name, changes in {
    "attention kernel on a hub": {"_attn_implementation": "owner/kernel"},
    "attention kernel, newer name": {"attn_implementation": "owner/kernel@main:f"},
    "attention kernel inside": {"text_config": {"_attn_implementation": "owner/kernel"}},
    "attention kernel twice inside": {"a": {"b": [{"attn_implementation": "owner/kernel"}]}},
}.items():
    MODEL.add(
        name,
        model(**changes),
        ends=(2,),
        names=("config.json", "owner/kernel"),
        quick="twice" in name,
    )
for name, changes in {
    "labels without end": {"num_labels": 10**9},
    "labels of a list": {"id2label": [1, 2]},
    "labels of anything": {"id2label": {"x": 1}},
    "ends of text": {"eos_token_id": "x"},
    "ends negative": {"eos_token_id": -1},
    "ends outside": {"eos_token_id": 10**9},
    "ends nested": {"eos_token_id": [1, [2]]},
    "one position": {"max_position_embeddings": 1},
    "positions without end": {"max_position_embeddings": 10**12},
    "positions text": {"max_position_embeddings": "many"},
    "norm of text": {"rms_norm_eps": "x"},
    "norm NaN": {"rms_norm_eps": float("nan")},
    "norm negative": {"rms_norm_eps": -1.0},
    "rope theta zero": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "rope theta NaN": {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
    "rope theta text": {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
    "window of text": {"sliding_window": "x", "use_sliding_window": True},
    "window negative": {"sliding_window": -5, "use_sliding_window": True},
    "dropout of text": {"attention_dropout": "x"},
    "dropout above one": {"attention_dropout": 5.0},
    "cache of text": {"use_cache": "no"},
    "encoder and decoder": {"is_encoder_decoder": True},
    "problem_type unknown": {"problem_type": "x"},
    "architectures of numbers": {"architectures": [1, 2]},
    "architectures of text": {"architectures": "Qwen2ForCausalLM"},
    "architecture unknown": {"architectures": ["Nobody"]},
    "flash attention": {"_attn_implementation": "flash_attention_2"},
    "attention a number": {"_attn_implementation": 5},
    "dtype fp8": {"dtype": "float8_e4m3fn"},
    "dtype int8": {"dtype": "int8"},
    "twenty thousand keys": {f"key_{n}": n for n in range(20_000)},
    "a key named self": {"self": 1, "__class__": "x", "__init__": None},
    "a version from the future": {"transformers_version": "999.0"},
    "a version of escapes": {"transformers_version": ESCAPES},
    "a base class": {"base_model_tp_plan": {"layers": ESCAPES}, "_name_or_path": ESCAPES},
}.items():
    MODEL.add(name, model(**changes), quick=name == "labels without end")
for name, content in {
    "nested deeply": deep(),
    "nested deeply inside": '{"model_type": "qwen2", "x": ' + deep() + "}",
    "an integer of 5000 digits": '{"model_type": "qwen2", "x": ' + long_integer() + "}",
    "empty": "",
    "a list": "[]",
    "null": "null",
    "not UTF-8": b"\xff\xfe{\x00}\x00",
    "cut off": '{"model_type": "qwe',
    "zero bytes": b"\0" * 1000,
    "text after the end": '{"model_type": "qwen2"} x' + ESCAPES,
}.items():
    MODEL.add(name, model_text(content), **REFUSED)
MODEL.add("a mark before the text", model_text(b"\xef\xbb\xbf{}"), **REFUSED)


def _remote_code(box: Box, model_type: str) -> list[str]:
    box.lora()
    box.write("run/base/modeling_evil.py", f"{box.touch}\nclass Evil:\n    pass\n")
    auto = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_evil.Evil")
    edit_json(box.base / "config.json", model_type=model_type, auto_map=auto)
    edit_json(box.base / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_evil.E"]})
    return probe(box)


MODEL.add("code beside it", lambda box: _remote_code(box, "qwen2"))
MODEL.add("code for an unknown type", lambda box: _remote_code(box, "evil"), ends=(2,))


def _seeded_model(box: Box) -> list[str]:
    box.lora()
    mutate_json(box.base / "config.json", box.rng)
    return probe(box)


MODEL.seeded(24, _seeded_model)


def _full(**changes: Any) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        box.full()
        edit_json(box.checkpoint / "config.json", **changes)
        return probe(box)

    return make


MODEL.add("full: as it is", _full(), ends=(0,))
MODEL.add("full: another width", _full(hidden_size=64), ends=(2,), names=("model.safetensors",))
MODEL.add("full: huge", _full(hidden_size=10**9), ends=(2,), names=("config.json",))
MODEL.add("full: fewer layers", _full(num_hidden_layers=1, layer_types=...), ends=(2,))
MODEL.add("full: more layers", _full(num_hidden_layers=6, layer_types=...), ends=(2,))
MODEL.add("full: ten million layers", _full(num_hidden_layers=10**7, layer_types=...), ends=(2,))


# --- adapter_config.json ------------------------------------------------------------------------


def adapter(**changes: Any) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        box.lora()
        edit_json(box.checkpoint / "adapter_config.json", **changes)
        return probe(box)

    return make


def adapter_text(content: str | bytes) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        box.lora()
        box.write("run/checkpoint-13/adapter_config.json", content)
        return probe(box)

    return make


BY_NAME: dict[str, Any] = {"ends": (2,), "names": ("adapter",)}
for name, changes in {
    "rank huge": {"r": 10**9},
    "rank beyond int64": {"r": 10**30},
    "rank zero": {"r": 0},
    "rank negative": {"r": -2},
    "rank true": {"r": True},
    "rank text": {"r": "2"},
    "rank a fraction": {"r": 2.5},
    "rank another": {"r": 4},
    "rank missing": {"r": ...},
    "alpha infinite": {"lora_alpha": float("inf")},
    "alpha NaN": {"lora_alpha": float("nan")},
    "alpha text": {"lora_alpha": "8"},
    "alpha zero": {"lora_alpha": 0},
    "alpha a list": {"lora_alpha": [8]},
    "dropout above one": {"lora_dropout": 2.0},
    "dropout negative": {"lora_dropout": -1.0},
    "dropout text": {"lora_dropout": "x"},
    "bias of nobody": {"bias": "x"},
    "bias all": {"bias": "all"},
    "dora without its tensors": {"use_dora": True},
    "dora as text": {"use_dora": "false"},
    "rslora as text": {"use_rslora": "false"},
    "rslora as a number": {"use_rslora": 1},
    "turned as text": {"fan_in_fan_out": "no"},
    "turned": {"fan_in_fan_out": 7},
    "bias as text": {"lora_bias": "false"},
    "qalora": {"use_qalora": True},
    "loftq": {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
    "loftq without settings": {"init_lora_weights": "loftq"},
    "corda": {"init_lora_weights": "corda"},
    "corda with settings": {
        "init_lora_weights": "corda",
        "corda_config": {"cache_file": "x", "covariance_file": "/etc/passwd"},
    },
    "eva": {"init_lora_weights": "eva"},
    "lora_ga": {"init_lora_weights": "lora_ga"},
    "a start that nobody knows": {"init_lora_weights": "nonsense"},
    "a start of a number": {"init_lora_weights": 7},
    "a start of a list": {"init_lora_weights": []},
    "pissa of many rounds": {"init_lora_weights": "pissa_niter_1000000000"},
    "targets nothing": {"target_modules": []},
    "targets null": {"target_modules": None},
    "targets a number": {"target_modules": 5},
    "targets numbers": {"target_modules": [5]},
    "targets nobody": {"target_modules": ["nobody"]},
    "targets no pattern": {"target_modules": "("},
    "targets a trap": {"target_modules": BACKTRACKING},
    "excludes a trap": {"exclude_modules": BACKTRACKING},
    "excludes no pattern": {"exclude_modules": "["},
    "ranks by a trap": {"rank_pattern": {BACKTRACKING: 3}},
    "ranks by no pattern": {"rank_pattern": {"(": 3}},
    "ranks a list": {"rank_pattern": [1]},
    "ranks of text": {"rank_pattern": {"q_proj": "3"}},
    "alphas by a trap": {"alpha_pattern": {BACKTRACKING: 3}},
    "alphas by no pattern": {"alpha_pattern": {"*": 3}},
    "alphas text": {"alpha_pattern": "q_proj"},
    "layers by a trap": {"layers_to_transform": [0], "layers_pattern": [BACKTRACKING]},
    "layers outside": {"layers_to_transform": [10**9]},
    "layers of text": {"layers_to_transform": "x"},
    "replicated without end": {"layer_replication": [[0, 10**9]]},
    "replicated text": {"layer_replication": "x"},
    "saved modules text": {"modules_to_save": "lm_head"},
    "saved modules a number": {"modules_to_save": 7},
    "tokens outside": {"trainable_token_indices": [10**9]},
    "tokens negative": {"trainable_token_indices": [-1]},
    "tokens text": {"trainable_token_indices": "x"},
    "parameters a number": {"target_parameters": 5},
    "activated": {"alora_invocation_tokens": [1, 2]},
    "another kind": {"peft_type": "IA3"},
    "no kind": {"peft_type": ...},
    "a kind of escapes": {"peft_type": ESCAPES},
    "no base": {"base_model_name_or_path": None},
    "base empty": {"base_model_name_or_path": ""},
    "base a number": {"base_model_name_or_path": 5},
    "base not there": {"base_model_name_or_path": "../nowhere"},
    "base a device": {"base_model_name_or_path": "/dev/zero"},
    "base with a zero byte": {"base_model_name_or_path": "../ba\0se"},
    "base of 100,000 letters": {"base_model_name_or_path": "x" * 100_000},
    "base of nobody's home": {"base_model_name_or_path": "~nobody_here/x"},
    "base of escapes": {"base_model_name_or_path": ESCAPES},
    "base on a hub": {"base_model_name_or_path": "owner/name"},
    "base on a hub, at a revision": {
        "base_model_name_or_path": "owner/name",
        "revision": "../../main",
    },
    "revision a number": {"revision": 5},
    "unknown key": {"lora_alhpa": 9},
    "unknown key of escapes": {ESCAPES: 1},
    "20,000 unknown keys": {f"key_{n}": n for n in range(20_000)},
    "arrow": {"arrow_config": {"top_k": 3}},
    "velora": {"velora_config": {"x": 1}},
    "kasa": {"kasa_config": {"x": 1}},
    "another task": {"task_type": "SEQ_CLS"},
    "a task of a number": {"task_type": 5},
    "a runtime of text": {"runtime_config": "x"},
}.items():
    quick = name in ("rank huge", "loftq", "20,000 unknown keys")
    ADAPTER.add(name, adapter(**changes), **{**BY_NAME, "quick": quick})


def _megatron(box: Box) -> list[str]:
    box.lora()
    module = box.module(box.touch)
    edit_json(
        box.checkpoint / "adapter_config.json",
        megatron_config={"tensor_model_parallel_size": 1},
        megatron_core=module,
    )
    return probe(box)


ADAPTER.add("megatron names a module", _megatron, ends=(2,), names=("megatron_config",), quick=True)


def _megatron_core(box: Box) -> list[str]:
    box.lora()
    edit_json(box.checkpoint / "adapter_config.json", megatron_core=box.module(box.touch))
    return probe(box)


ADAPTER.add("megatron_core names a module", _megatron_core, ends=(2,), names=("megatron_core",))


def _auto_mapping(box: Box) -> list[str]:
    box.lora()
    mapping = {"base_model_class": "Evil", "parent_library": box.module(box.touch)}
    edit_json(box.checkpoint / "adapter_config.json", auto_mapping=mapping)
    return probe(box)


ADAPTER.add("auto_mapping names a module", _auto_mapping)
for name, content in {
    "nested deeply": deep(),
    "an integer of 5000 digits": '{"peft_type": "LORA", "r": ' + long_integer() + "}",
    "empty": "",
    "a list": "[1]",
    "not UTF-8": b"\xff{}",
    "cut off": '{"peft_type": "LO',
    "NaN": "NaN",
}.items():
    ADAPTER.add(name, adapter_text(content), ends=(2,), names=("adapter_config.json",))
ADAPTER.add("as it is", adapter(), ends=(0,))
for name, changes in {
    "saved modules of nobody": {"modules_to_save": ["nobody"]},
    "parameters of nobody": {"target_parameters": ["nobody"]},
}.items():
    ADAPTER.add(name, adapter(**changes))  # peft passes over them
for name, base in {"base itself": ".", "base above": ".."}.items():
    ADAPTER.add(name, adapter(base_model_name_or_path=base), ends=(2,), names=("config.json",))
ADAPTER.add("task null", adapter(task_type=None), ends=(0,))
ADAPTER.add("a new key that is null", adapter(new_in_peft_9=None), ends=(0, 2))


def _seeded_adapter(box: Box) -> list[str]:
    box.lora()
    mutate_json(box.checkpoint / "adapter_config.json", box.rng)
    return probe(box)


ADAPTER.seeded(20, _seeded_adapter)


# --- tokenizer, generation, chat template -------------------------------------------------------


def base_file(name: str, content: str | bytes, *sets: str) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        box.lora()
        box.write(f"run/base/{name}", content)
        return probe(box, sets=sets)

    return make


def base_edit(name: str, *sets: str, **changes: Any) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        box.lora()
        edit_json(box.base / name, **changes)
        return probe(box, sets=sets)

    return make


for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
    for name, content in {
        "nested deeply": deep(),
        "empty": "",
        "a list": "[]",
        "not UTF-8": b"\xff\xfe\x00",
        "cut off": '{"version": "1.',
        "an integer of 5000 digits": '{"x": ' + long_integer() + "}",
    }.items():
        quick = file == "tokenizer.json" and name == "nested deeply"
        TOKENIZER.add(
            f"{file} {name}",
            base_file(file, content),
            ends=(2,),
            names=("base",),
            quick=quick,
        )
for name, changes in {
    "class unknown": {"tokenizer_class": "Nobody"},
    "class a number": {"tokenizer_class": 5},
    "class with code": {"tokenizer_class": "os.system", "auto_map": {"AutoTokenizer": "x.Y"}},
    "end a number": {"eos_token": 5},
    "end a list": {"eos_token": ["<eos>"]},
    "end nobody knows": {"eos_token": "<nobody>"},
    "end of escapes": {"eos_token": ESCAPES},
    "end a surrogate": {"eos_token": "\ud800"},
    "length of text": {"model_max_length": "x"},
    "length negative": {"model_max_length": -5},
    "added tokens of text": {"added_tokens_decoder": {"x": {"content": "<x>"}}},
    "added tokens outside": {"added_tokens_decoder": {"99999999": {"content": "<x>"}}},
    "added tokens without content": {"added_tokens_decoder": {"5": {}}},
    "extra special of numbers": {"additional_special_tokens": [1, 2]},
    "padding side": {"padding_side": "up"},
    "backend unknown": {"backend": "nobody"},
}.items():
    TOKENIZER.add(name, base_edit("tokenizer_config.json", **changes))
for name, changes in {
    "ends of text": {"eos_token_id": "x"},
    "ends negative": {"eos_token_id": [-5]},
    "ends outside": {"eos_token_id": 10**12},
    "temperature text": {"temperature": "hot"},
    "temperature zero": {"temperature": 0.0, "do_sample": True},
    "cache unknown": {"cache_implementation": "nobody"},
    "unknown keys": {"nobody": 1, "self": 2},
    "code": {"custom_generate": "owner/name"},
    "sequences": {"suppress_tokens": "x", "bad_words_ids": [[]], "num_beams": -1},
    "a watermark": {"watermarking_config": {"x": 1}},
    "compiled": {"compile_config": {"backend": "nobody"}},
}.items():
    TOKENIZER.add(f"generation: {name}", base_edit("generation_config.json", **changes))

CHAT = ("batch_config.chat_template=true",)
for name, template in {
    "not closed": "{% for m in messages %}",
    "unknown filter": "{{ messages | nobody }}",
    "raises": "{{ raise_exception('no " + "\\x1b[31m" + "') }}",
    "divides by zero": "{{ 1 / 0 }}",
    "an undefined": "{{ nobody.of.these }}",
    "without end": "{% for i in range(9**5) %}" * 2 + "x" + "{% endfor %}" * 2,
    "of ranges too large": "{% for i in range(10**9) %}x{% endfor %}",
    "a long text": "{{ 'x' * (10 ** 11) }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "escapes the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reads a file": "{% include '/etc/passwd' %}",
    "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nothing": "",
    "a number": 5,
    "a list": [{"name": "default", "template": "{{ 1 / 0 }}"}],
    "controls": "\x1b[31m{{ messages[0].content }}",
    "a surrogate": "{{ messages[0].content }}\ud800",
    "a million brackets": "{" * 100_000,
}.items():
    TOKENIZER.add(
        f"template {name}",
        base_edit("tokenizer_config.json", *CHAT, chat_template=template),
        quick=name == "not closed",
    )


def _canary_template(box: Box) -> list[str]:
    box.lora()
    called = f"__import__('os').system('touch {box.canary}')"
    template = (
        "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{{ c }}{% endfor %}"
        "{{ cycler.__init__.__globals__.os.popen('touch " + str(box.canary) + "').read() }}"
        "{{ " + called + " }}"
    )
    edit_json(box.base / "tokenizer_config.json", chat_template=template)
    return probe(box, sets=CHAT)


TOKENIZER.add("template that calls a shell", _canary_template, quick=True, ends=(2,))
TOKENIZER.add("no template", lambda b: (b.lora(), probe(b, sets=CHAT))[1], ends=(2,))


def _seeded_tokenizer(box: Box) -> list[str]:
    box.lora()
    mutate_json(box.base / box.rng.choice(("tokenizer.json", "tokenizer_config.json")), box.rng)
    return probe(box)


TOKENIZER.seeded(16, _seeded_tokenizer)


# --- safetensors and their index ----------------------------------------------------------------


def tensors(header: Any, body: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def weights(content: bytes, name: str = "adapter_model.safetensors") -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        box.lora()
        box.write(f"run/checkpoint-13/{name}", content)
        return probe(box)

    return make


def one(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


for name, content in {
    "empty": b"",
    "seven bytes": b"1234567",
    "a header without end": tensors(b"{}", length=2**63),
    "a header of 2 GB": tensors(b"{}", length=2**31),
    "a header past the file": tensors(b"{}", length=1000),
    "a header of no JSON": tensors(b"not JSON"),
    "a header of a list": tensors(b"[]"),
    "a header nested deeply": tensors(deep().encode()),
    "a header not UTF-8": tensors(b'{"\xff": 1}'),
    "offsets backwards": tensors(one(offsets=(8, 0)), b"\0" * 8),
    "offsets past the file": tensors(one(offsets=(0, 10**15)), b"\0" * 8),
    "offsets negative": tensors(one(offsets=(-8, 0)), b"\0" * 8),
    "a shape of 10**18": tensors(one(shape=(10**9, 10**9)), b"\0" * 8),
    "a shape negative": tensors(one(shape=(-2,)), b"\0" * 8),
    "a shape of text": tensors(one(shape="x"), b"\0" * 8),
    "a dtype unknown": tensors(one(dtype="F7"), b"\0" * 8),
    "a dtype a number": tensors(one(dtype=7), b"\0" * 8),
    "an empty header": tensors({}),
    "metadata of numbers": tensors({"__metadata__": {"x": 1}}),
    "a name of escapes": tensors({ESCAPES: one()["x"]}, b"\0" * 8),
    "a pickle": pickle.dumps({"x": 1}),
    "100,000 tensors": tensors(
        {f"t{n}": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(10**5)},
        b"\0" * 10**5,
    ),
}.items():
    WEIGHTS.add(
        name,
        weights(content),
        ends=(2,),
        names=("adapter_model",),
        quick=name == "a name of escapes",
    )


def adapter_tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        from safetensors.torch import load_file, save_file

        file = box.lora() / "adapter_model.safetensors"
        stored = load_file(file)
        change(stored)
        save_file(stored, file)
        return probe(box)

    return make


def _cast(dtype: str) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        import torch

        for name in stored:
            stored[name] = stored[name].to(getattr(torch, dtype))

    return change


def _first(act: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        name = sorted(stored)[0]
        stored[name] = act(stored[name]).contiguous()

    return change


def _rename(stored: dict[str, Any]) -> None:
    name = sorted(stored)[0]
    stored[ESCAPES + name] = stored.pop(name)


for name, change in {
    "fp8": _cast("float8_e4m3fn"),
    "integers": _cast("int64"),
    "bools": _cast("bool"),
    "complex": _cast("complex64"),
    "NaN": _first(lambda t: t * float("nan")),
    "infinite": _first(lambda t: t / 0),
    "turned": _first(lambda t: t.T),
    "flat": _first(lambda t: t.reshape(-1)),
    "a scalar": _first(lambda t: t.sum()),
    "one missing": lambda s: s.pop(sorted(s)[0]),
    "all missing": lambda s: s.clear(),
    "renamed": _rename,
}.items():
    WEIGHTS.add(
        f"tensors {name}",
        adapter_tensors(change),
        ends=(2,),
        names=("adapter_model.safetensors",),
        quick=name == "fp8",
    )
for dtype in ("float16", "bfloat16", "float64"):
    WEIGHTS.add(f"tensors {dtype}", adapter_tensors(_cast(dtype)))


def indexed(index: Any, *, shards: bool = True) -> Callable[[Box], list[str]]:
    """A full checkpoint in one shard that an index names."""

    def make(box: Box) -> list[str]:
        folder = box.full()
        whole = folder / "model.safetensors"
        if shards:
            whole.rename(folder / "model-00001-of-00001.safetensors")
        else:
            whole.unlink()
        value = index(folder) if callable(index) else index
        box.write(
            "run/checkpoint-13/model.safetensors.index.json",
            value if isinstance(value, str | bytes) else json.dumps(value),
        )
        return probe(box)

    return make


def _map(**more: str) -> Callable[[Path], dict[str, Any]]:
    def index(folder: Path) -> dict[str, Any]:
        from safetensors import safe_open

        name = "model-00001-of-00001.safetensors"
        with safe_open(folder / name, framework="pt") as held:
            return {"metadata": {}, "weight_map": {**dict.fromkeys(held.keys(), name), **more}}

    return index


WEIGHTS.add("index: as it is", indexed(_map()), ends=(0,))
for name, index in {
    "outside": _map(**{"model.norm.weight": "../../../outside.safetensors"}),
    "absolute": _map(**{"model.norm.weight": "/etc/passwd"}),
    "a shard that is not there": _map(**{"model.norm.weight": "x.safetensors"}),
    "a device": _map(**{"model.norm.weight": "/dev/zero"}),
    "a name too many": _map(nobody="model-00001-of-00001.safetensors"),
    "numbers": {"weight_map": {"x": 5}},
    "a list": {"weight_map": ["x"]},
    "text": {"weight_map": "x"},
    "no map": {},
    "empty map": {"weight_map": {}},
    "null": {"weight_map": None},
    "of a list": "[]",
    "nested deeply": deep(),
    "nested names": {"weight_map": {"x": {"y": "z"}}},
    "escapes": {"weight_map": {"x": ESCAPES}},
}.items():
    WEIGHTS.add(
        f"index: {name}",
        indexed(index),
        ends=(2,),
        names=("index.json",),
        quick=name == "outside",
    )


def _seeded_weights(box: Box) -> list[str]:
    box.lora()
    mutate_bytes(box.checkpoint / "adapter_model.safetensors", box.rng)
    return probe(box)


def _seeded_base(box: Box) -> list[str]:
    box.lora()
    mutate_bytes(box.base / "model.safetensors", box.rng)
    return probe(box)


WEIGHTS.seeded(12, _seeded_weights)
for seed in range(6):
    WEIGHTS.add(f"base seed {seed}", _seeded_base)


def _fifo(place: str) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        box.lora()
        path = box.folder / place
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        return probe(box)

    return make


for place in (
    "run/checkpoint-13/adapter_config.json",
    "run/checkpoint-13/adapter_model.safetensors",
    "run/checkpoint-13/optimizer.pt",
    "run/checkpoint-13/trainer_state.json",
    "run/base/config.json",
    "run/base/model.safetensors",
    "run/base/tokenizer.json",
    "run/entropy_probe.json",
):
    WEIGHTS.add(f"a pipe in place of {place}", _fifo(place))


# --- optimizer.pt -------------------------------------------------------------------------------


def stored(change: Callable[[Any], Any]) -> Callable[[Box], list[str]]:
    """optimizer.pt with other contents; `change` returns them, or changes what it gets."""

    def make(box: Box) -> list[str]:
        import torch

        file = box.lora() / "optimizer.pt"
        held = torch.load(file, weights_only=True)
        made = change(held)
        torch.save(held if made is None else made, file)
        return probe(box)

    return make


def group(**changes: Any) -> Callable[[Any], None]:
    def change(held: Any) -> None:
        for key, value in changes.items():
            if value is ...:
                held["param_groups"][0].pop(key, None)
            else:
                held["param_groups"][0][key] = value

    return change


def entry(key: str, act: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(held: Any) -> None:
        held["state"][0][key] = act(held["state"][0][key])

    return change


def _torch(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def act(held: Any) -> Any:
        import torch

        return call(torch)

    return act


for name, change in {
    "nothing": lambda held: {},
    "a list": lambda held: [1, 2],
    "a number": lambda held: 5,
    "a tensor": _torch(lambda torch: torch.zeros(3)),
    "no groups": lambda held: {**held, "param_groups": []},
    "groups a number": lambda held: {**held, "param_groups": 5},
    "groups of numbers": lambda held: {**held, "param_groups": [5]},
    "groups a mapping": lambda held: {**held, "param_groups": {"params": [0]}},
    "groups without params": group(params=...),
    "params a number": group(params=7),
    "params nested": group(params=[[0]] * 24),
    "params twice": group(params=[0] * 24),
    "state a list": lambda held: {**held, "state": [1]},
    "state a number": lambda held: {**held, "state": 5},
    "state of numbers": lambda held: {**held, "state": {0: 5}},
    "state of lists": lambda held: {**held, "state": {0: [1]}},
    "lr text": group(lr="x"),
    "lr NaN": group(lr=float("nan")),
    "lr infinite": group(lr=float("inf")),
    "lr negative": group(lr=-1.0),
    "lr null": group(lr=None),
    "lr a list": group(lr=[1.0]),
    "lr missing": group(lr=...),
    "lr a tensor of many": group(lr=_torch(lambda torch: torch.zeros(3))(None)),
    "betas one": group(betas=(0.9,)),
    "betas three": group(betas=(0.9, 0.9, 0.9)),
    "betas text": group(betas="xy"),
    "betas a number": group(betas=0.9),
    "betas outside": group(betas=(0.9, 1.5)),
    "eps negative": group(eps=-1.0),
    "eps text": group(eps="x"),
    "decay NaN": group(weight_decay=float("nan")),
    "decay text": group(weight_decay="x"),
    "names of numbers": group(param_names=[5] * 24),
    "names of nobody": group(param_names=["x"] * 24),
    "step text": entry("step", lambda step: "x"),
    "step negative": entry("step", lambda step: step * 0 - 5),
    "step NaN": entry("step", lambda step: step * float("nan")),
    "step of many": entry("step", lambda step: step.repeat(3)),
    "step null": entry("step", lambda step: None),
    "step huge": entry("step", lambda step: 10**400),
    "moment text": entry("exp_avg", lambda moment: "x"),
    "moment NaN": entry("exp_avg", lambda moment: moment * float("nan")),
    "moment of integers": entry("exp_avg", lambda moment: moment.long()),
    "moment of bools": entry("exp_avg_sq", lambda moment: moment.bool()),
    "moment complex": entry("exp_avg", lambda moment: moment.to(_complex())),
    "moment turned": entry("exp_avg", lambda moment: moment.T),
    "moment negative": entry("exp_avg_sq", lambda moment: -moment - 1),
    "moment missing": lambda held: held["state"][0].__delitem__("exp_avg"),
    "moment sparse": entry("exp_avg", lambda moment: moment.to_sparse()),
    "escapes": lambda held: {ESCAPES: 1},
}.items():
    OPTIMIZER.add(
        name,
        stored(change),
        ends=(2,),
        names=("optimizer",),
        quick=name == "groups of numbers",
    )


def _complex() -> Any:
    import torch

    return torch.complex64


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def pickled(name: str, wrap: Callable[[Any], bytes]) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        box.lora()
        box.write(f"run/checkpoint-13/{name}", wrap(Evil(box.canary)))
        return probe(box)

    return make


def _saved(evil: Any, **more: Any) -> bytes:
    import io

    import torch

    file = io.BytesIO()
    torch.save({"state": evil, "param_groups": []}, file, **more)
    return file.getvalue()


OPTIMIZER.add("a pickle", pickled("optimizer.pt", pickle.dumps), ends=(2,))
OPTIMIZER.add("a pickle inside", pickled("optimizer.pt", _saved), ends=(2,), quick=True)
OPTIMIZER.add(
    "a pickle inside, the old way",
    pickled("optimizer.pt", lambda e: _saved(e, _use_new_zipfile_serialization=False)),
    ends=(2,),
)
for name in ("training_args.bin", "scheduler.pt", "rng_state.pth"):
    OPTIMIZER.add(f"a pickle in {name}", pickled(name, _saved), ends=(0,))


def _adapter_pickle(box: Box) -> list[str]:
    (box.lora() / "adapter_model.safetensors").unlink()
    box.write("run/checkpoint-13/adapter_model.bin", _saved(Evil(box.canary)))
    return probe(box)


OPTIMIZER.add("a pickle in adapter_model.bin", _adapter_pickle, ends=(2,))


def _model_pickle(box: Box) -> list[str]:
    (box.full() / "model.safetensors").unlink()
    box.write("run/checkpoint-13/pytorch_model.bin", _saved(Evil(box.canary)))
    return probe(box)


OPTIMIZER.add("a pickle in pytorch_model.bin", _model_pickle, ends=(2,))


def _seeded_optimizer(box: Box) -> list[str]:
    box.lora()
    mutate_bytes(box.checkpoint / "optimizer.pt", box.rng)
    return probe(box)


OPTIMIZER.seeded(14, _seeded_optimizer)


def names_beside(content: Any) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        box.lora()
        text = content if isinstance(content, str) else json.dumps(content)
        box.write("run/checkpoint-13/optimizer_param_names.json", text)
        return probe(box)

    return make


for name, content in {
    "a number": 5,
    "numbers": [1, 2],
    "too few": ["x"],
    "nobody's": ["x"] * 24,
    "nested deeply": deep(),
    "nested": [[["x"]]],
    "null": None,
    "escapes": [ESCAPES] * 24,
}.items():
    OPTIMIZER.add(f"names beside: {name}", names_beside(content), ends=(2,))


# --- trainer_state.json -------------------------------------------------------------------------


def state(content: Any) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        box.lora()
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        box.write("run/checkpoint-13/trainer_state.json", text)
        return probe(box)

    return make


for name, content in {
    "empty": "",
    "a list": "[]",
    "nested deeply": deep(),
    "an integer of 5000 digits": '{"global_step": ' + long_integer() + "}",
    "cut off": '{"global_',
    "not UTF-8": b"\xff\xff",
    "a step of another folder": {"global_step": 99},
    "a step of text": {"global_step": "13"},
    "a step negative": {"global_step": -1},
    "a step true": {"global_step": True},
    "a step without end": {"global_step": 10**30},
}.items():
    quick = name == "nested deeply"
    STATE.add(name, state(content), names=("trainer_state.json",), quick=quick)
STATE.add("as it is", state({"global_step": 13}), ends=(0,))


def _seeded_state(box: Box) -> list[str]:
    box.lora()
    mutate_json(box.checkpoint / "trainer_state.json", box.rng)
    return probe(box)


STATE.seeded(4, _seeded_state)

FAMILIES = (MODEL, ADAPTER, TOKENIZER, WEIGHTS, OPTIMIZER, STATE)
