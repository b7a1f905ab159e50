"""Hostile settings: YAML of probes and trainings, and facts beside a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from entropy_experiments.config import template_text
from hostile.harness import Box, Cases, probe
from hostile.mutations import ESCAPES, deep, long_integer, mutate_text

CONFIG = Cases("configuration")
TRAINING = Cases("training configuration")
FACTS = Cases("training facts")

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join('*' + chr(97 + n) for _ in range(9))}]\n"
    for n in range(12)
)


def check(text: str | bytes) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        return ["config", "check", str(box.write("probe.yaml", text))]

    return make


def ran(text: str) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        sets = () if "batch:" in text else ("update.batch=drawn",)
        return probe(box, "--config", str(box.write("probe.yaml", text)), sets=sets)

    return make


BY_FILE: dict[str, Any] = {"ends": (2,), "names": ("probe.yaml",)}
for name, text in {
    "a bomb": BOMB,
    "a bomb of merges": "a: &a {x: 1}\n"
    + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)}\n  <<: [{', '.join('*' + chr(97 + n) for _ in range(9))}]\n"
        for n in range(12)
    ),
    "nested deeply": "a: " + deep(50_000),
    "nested deeply by indents": "\n".join(" " * n + "a:" for n in range(2000)),
    "holds itself": "batch_config: &x {B_E: *x}",
    "holds itself in a list": "batch_config: {B_E: &x [*x]}",
    "20,000 unknown keys": "\n".join(f"key_{n}: 1" for n in range(20_000)),
    "20,000 unknown keys inside": "batch_config:\n"
    + "".join(f"  k{n}: 1\n" for n in range(20_000)),
    "a key twice": "batch_config: {B_E: 5, B_E: 6}",
    "a section twice": "batch_config: {B_E: 5}\nbatch_config: {B_U: 1}",
    "an object": "batch_config: !!python/object/apply:os.system ['touch canary']",
    "a name": "batch_config: !!python/name:os.system",
    "a tag of one's own": "batch_config: !evil {B_E: 5}",
    "a set": "batch_config: !!set {B_E, B_U}",
    "binary": "batch_config: !!binary aGVsbG8=",
    "binary that is none": "checkpoint: {base: !!binary '%%%'}",
    "a date": "batch_config: {B_E: 2026-01-01}",
    "an int by tag": "batch_config: {B_E: !!int x}",
    "a float by tag": "batch_config: {B_E: !!float x}",
    "a bool by tag": "batch_config: {B_E: !!bool x}",
    "null by tag": "batch_config: {B_E: !!null x}",
    "a time by tag": "batch_config: {B_E: !!timestamp x}",
    "omap by tag": "batch_config: !!omap [x]",
    "pairs by tag": "batch_config: !!pairs [x]",
    "an integer of 5000 digits": "batch_config: {B_E: " + long_integer() + "}",
    "an integer of base 60": "batch_config: {B_E: 1:1:1}",
    "a hex integer without end": "batch_config: {B_E: 0x" + "f" * 20_000 + "}",
    "beyond int64": f"batch_config: {{B_E: {10**30}}}",
    "a million prompts": "batch_config: {B_E: 1000000000000}",
    "negative": "batch_config: {B_E: -5}",
    "zero": "batch_config: {B_E: 0}",
    "a fraction": "batch_config: {B_E: 5.5}",
    "text": "batch_config: {B_E: '5'}",
    "true": "batch_config: {B_E: true}",
    "a list": "batch_config: {B_E: [5]}",
    "infinite": "update: {lr: .inf}",
    "NaN": "update: {lr: .nan}",
    "1e400": "update: {lr: 1e400}",
    "lr negative": "update: {lr: -1.0}",
    "temperature zero": "generation: {temperature: 0}",
    "top_p above one": "generation: {top_p: 1.5}",
    "section a list": "batch_config: [1, 2]",
    "section text": "batch_config: all",
    "file a list": "- 1\n- 2",
    "file text": "just text",
    "file a number": "42",
    "empty": "",
    "comments": "# nothing",
    "two documents": "a: 1\n---\nb: 2",
    "tabs": "batch_config:\n\tB_E: 5",
    "zero bytes": b"batch_config:\0",
    "not UTF-8": b"\xff\xfe\xfa",
    "UTF-16": "batch_config: {B_E: 5}".encode("utf-16"),
    "escapes in a key": f"'{ESCAPES}': 1".replace("\x1b", "\\x1b"),
    "escapes by YAML": '"\\x1b[31mred\\u202e": 1',
    "escapes in a value": 'batch_config: {B_E: "\\x1b[31m\\u202e\\a"}',
    "a surrogate": 'batch_config: {B_E: "\\ud800"}',
    "a key of a list": "? [1, 2]\n: 3",
    "a key of a mapping": "? {a: 1}\n: 3",
    "a key of a number": "5: 3",
    "a key null": "~: 3",
    "a key true": "true: 3",
    "keys of many kinds inside": "batch_config: {5: 1, true: 2, ~: 3, B_E: 5}",
    "an alias of nobody": "a: *nobody",
    "an unknown key near": "batch_config: {B_e: 5}",
    "a long key": f"{'x' * 100_000}: 1",
    "code as a reward": 'reward: {functions: [\'__import__("os").system("touch canary"):x\']}',
    "weights without functions": "reward: {weights: [1.0]}",
    "aliases that disagree": "importance: {clip_c: 3.0}\ntrue_delta_h: {clip_c: 4.0}",
}.items():
    quick = name in ("a bomb", "20,000 unknown keys", "an object")
    CONFIG.add(name, check(text), **{**BY_FILE, "quick": quick})
for name, text in {
    "a long value": f"batch_config: {{dataset_name: {'x' * 100_000}}}",
    "device unknown": "checkpoint: {device_map: nobody}",
    "device of another machine": "checkpoint: {device_map: 'cuda:7'}",
    "device negative": "checkpoint: {device_map: 'cpu:-1'}",
    "device a mapping": "checkpoint: {device_map: {'': 'cuda:3'}}",
    "device a list": "checkpoint: {device_map: [cpu]}",
    "device meta": "checkpoint: {device_map: meta}",
    "device disk": "checkpoint: {device_map: {'': disk}}",
    "dataset unknown": "batch_config: {dataset_name: nobody}",
    "dataset escapes": 'batch_config: {dataset_name: "\\x1b[31m"}',
    "task of a gym unknown": "batch_config: {dataset_name: 'reasoning_gym:nobody'}",
    "split unknown": "batch_config: {dataset_name: gsm8k, split: nobody, dataset_path: .}",
    "backbone unknown": "checkpoint: {backbone: nobody}",
    "base not there": "checkpoint: {base: ./nowhere}",
    "base a file": "checkpoint: {base: probe.yaml}",
    "optimizer not there": "checkpoint: {optimizer_path: ./nowhere}",
    "optimizer a YAML": "checkpoint: {optimizer_path: probe.yaml}",
    "reward unknown": "reward: {functions: [nobody]}\nupdate: {batch: drawn}",
    "stop without end": "generation: {stop: ['" + "x" * 10_000 + "']}",
    "stop empty": "generation: {stop: ['']}",
    "rollouts not there": "rollouts: {load: ./nowhere}",
    "rollouts a file": "rollouts: {load: probe.yaml}",
    "a batch of more than there is": "memory_config: {microbatch_size: 100000}",
}.items():
    CONFIG.add(name, ran(text), quick=name == "device of another machine")


def _fifo_config(box: Box) -> list[str]:
    os.mkfifo(box.path("probe.yaml"))
    return ["config", "check", str(box.folder / "probe.yaml")]


CONFIG.add("a pipe", _fifo_config, **BY_FILE)
CONFIG.add(
    "an endless device", lambda b: ["run", "--config", "/dev/zero"], ends=(2,), names=("/dev/zero",)
)
CONFIG.add("40 MB", check("# " + "x" * 40_000_000 + "\nbatch_config: {B_E: 5}"), ends=(0, 2))


def _seeded_config(box: Box) -> list[str]:
    text = template_text(box.rng.choice(("config_template.yaml", "test_deltaH1.yaml")))
    for _ in range(1 + box.rng.randrange(3)):
        text = mutate_text(text, box.rng)
    return ["config", "check", str(box.write("probe.yaml", text))]


CONFIG.seeded(24, _seeded_config)


def train(text: str, *more: str, dry: bool = True) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        file = box.write("train.yaml", text)
        options = ["--dry-run"] if dry else []
        return ["train", "--config", str(file), "--out", str(box.out), *options, *more]

    return make


TRAIN_FILE: dict[str, Any] = {"ends": (2,), "names": ("train.yaml",)}
for name, text in {
    "a bomb": BOMB,
    "20,000 unknown keys": "\n".join(f"key_{n}: 1" for n in range(20_000)),
    "20,000 unknown keys of TRL's": "trl:\n" + "\n".join(f"  key_{n}: 1" for n in range(20_000)),
    "1e8 steps": "max_steps: 100000000",
    "1e8 generations": "num_generations: 100000000",
    "1e8 prompts": "buffer_size: 100000000",
    "1e8 tokens": "max_completion_length: 100000000",
    "1e30 steps": f"max_steps: {10**30}",
    "1e12 accumulation": f"gradient_accumulation_steps: {10**12}",
    "1e9 problems": "dataset_size: 1000000000",
    "1e9 for the probe": "eval_prompts: 1000000000",
    "1e9 prompts of the probe": "probe: {prompts: 1000000000}",
    "seed beyond": f"seed: {10**30}",
    "lr zero": "learning_rate: 0",
    "lr NaN": "learning_rate: .nan",
    "lora text": "lora: big",
    "lora rank huge": "lora: {r: 1000000000}",
    "lora targets nothing": "lora: {target_modules: []}",
    "model a number": "model: 5",
    "one generation": "num_generations: 1",
    "batch that does not divide": "buffer_size: 7\nmicrobatch_size: 3",
    "code as a reward": "reward_functions: ['os:system(1)']",
    "remote code": "trl: {trust_remote_code: true}",
    "remote code by kwargs": "trl: {model_init_kwargs: {trust_remote_code: true}}",
    "a key of TRL's twice": "trl: {learning_rate: 5}",
    "trl a list": "trl: [1]",
    "trl of numbers": "trl: {5: 6}",
    "probe text": "probe: all",
    "doctor a list": "doctor: [1]",
    "report to a number": "report_to: 5",
    "output a number": "output_dir: 5",
}.items():
    TRAINING.add(
        name, train(text), **{**TRAIN_FILE, "quick": name in ("1e8 generations", "1e8 steps")}
    )
for name, text in {
    "dataset unknown": "dataset_name: nobody",
    "reward unknown": "reward_functions: [nobody]",
    "preset of another name": "model: ./nowhere",
    "tracker unknown": "report_to: [nobody]",
}.items():
    TRAINING.add(name, train(text))


def beside(name: str, content: Any) -> Callable[[Box], list[str]]:
    """A file with facts of the training, beside the checkpoint."""

    def make(box: Box) -> list[str]:
        folder = box.lora()
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        box.write(str(folder.relative_to(box.folder) / name), text)
        return probe(box)

    return make


OWN, TRL = "entropy_probe.json", "trl.yaml"
for name, content in {
    "nested deeply": deep(),
    "a list": [],
    "empty": "",
    "an integer of 5000 digits": '{"beta": ' + long_integer() + "}",
    "20,000 unknown keys": {f"key_{n}": n for n in range(20_000)},
    "unknown key": {"lss": "dapo"},
    "unknown key of escapes": {ESCAPES: 1},
    "loss unknown": {"loss": "nobody"},
    "loss a number": {"loss": 5},
    "beta text": {"beta": "x"},
    "beta negative": {"beta": -1},
    "temperature zero": {"temperature": 0},
    "temperature NaN": '{"temperature": NaN}',
    "horizon huge": {"max_completion_length": 10**12},
    "rewards code": {"reward_functions": ["os:system"]},
    "rewards unknown": {"reward_functions": ["nobody"]},
    "rewards a number": {"reward_functions": 5},
    "weights without functions": {"reward_weights": [1.0]},
    "dataset unknown": {"dataset_name": "nobody"},
    "dataset path a number": {"dataset_path": 5},
    "a stop of numbers": {"stop": [1]},
}.items():
    FACTS.add(name, beside(OWN, content), ends=(2,), names=(OWN,), quick=name == "rewards code")
for name, content in {
    "a bomb": BOMB + "lr: *h",
    "nested deeply": "a: " + deep(50_000),
    "holds itself": "a: &x [*x]",
    "an object": "a: !!python/object/apply:os.system ['touch canary']",
    "a list": "[1]",
    "empty": "",
    "an integer of 5000 digits": "beta: " + long_integer(),
    "beta text": "beta: x",
    "beta a list": "beta: [1]",
    "lengths infinite": "max_completion_length: .inf",
    "lengths a fraction": "max_completion_length: 5.5",
    "not UTF-8": b"\xff\xfe\xfa",
    "a key twice": "beta: 0.1\nbeta: 0.2",
    "escapes": 'beta: "\\x1b[31m"',
}.items():
    FACTS.add(
        f"TRL's: {name}", beside(TRL, content), ends=(2,), names=(TRL,), quick=name == "a bomb"
    )
for name, content in {
    "20,000 keys": "\n".join(f"key_{n}: 1" for n in range(20_000)),
    "weights text": "reward_funcs: [countdown]\nreward_weights: x",
    "notes of escapes": 'dataset_name: "\\x1b[31m\\u202e"\nreward_funcs: ["\\x1b[0m"]',
    "not followed": 'top_k: "\\x1b[31m"\ngeneration_kwargs: {a: [1, {b: "\\x07"}]}',
    "loss unknown": "loss_type: nobody",
    "loss a list": "loss_type: [1]",
    "advantage a list": "scale_rewards: [1]",
    "advantage a mapping": "scale_rewards: {a: 1}",
    "ratio a number": "importance_sampling_level: 5",
    "keys of many kinds": "5: 1\n? [1]\n: 2\n~: 3\nbeta: 0.0",
}.items():
    FACTS.add(f"TRL's: {name}", beside(TRL, content))
FACTS.add(
    "a note of escapes",
    beside(
        OWN, {"note": [ESCAPES], "dataset_name": "countdown", "reward_functions": ["countdown"]}
    ),
    ends=(0,),
    quick=True,
)

FAMILIES = (CONFIG, TRAINING, FACTS)
