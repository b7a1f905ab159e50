"""What training was like, as far as files beside a checkpoint say.

`entropy_probe.json` is this project's own: a flat object of the names below, others refused.
A TRL YAML (the file given to `trl grpo --config`) has hundreds of keys; those that decide the step
are translated and the rest are not ours to judge. The JSON wins where both speak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from entropy_experiments.policy.layout import read_json

FACTS_FILE = "entropy_probe.json"
TRL_FILES = ("trl.yaml", "trl_config.yaml", "grpo.yaml", "training.yaml", "train.yaml")

KNOWN = (
    "loss",
    "advantage",
    "clip_low",
    "clip_high",
    "ratio",
    "beta",
    "entropy_coef",
    "max_grad_norm",
    "max_completion_length",
    "num_iterations",
    "lr",
    "amp_dtype",
    "temperature",
    "top_p",
    "stop",
    "dataset_name",
    "dataset_path",
    "split",
    "B_U",
    "G",
    "reward_functions",
    "reward_weights",
    "load_in_4bit",
    "load_in_8bit",
    "note",
)


def _same(value: Any) -> Any:
    return value


def _scale(value: Any) -> Any:
    """TRL's scale_rewards: true and "group", false and "none" mean the same."""
    return {True: "group", False: "none", "true": "group", "false": "none"}.get(value, value)


FROM_TRL: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "loss_type": ("loss", _same),
    "scale_rewards": ("advantage", _scale),
    "epsilon": ("clip_low", float),
    "epsilon_high": ("clip_high", float),
    "importance_sampling_level": ("ratio", _same),
    "beta": ("beta", float),
    "entropy_coef": ("entropy_coef", float),
    "max_grad_norm": ("max_grad_norm", float),
    "max_completion_length": ("max_completion_length", int),
    "num_iterations": ("num_iterations", int),
    "learning_rate": ("lr", float),
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "num_generations": ("G", int),
    "dataset_name": ("dataset_name", _same),
    "reward_funcs": ("reward_functions", _same),
    "reward_weights": ("reward_weights", _same),
    "load_in_4bit": ("load_in_4bit", bool),
    "load_in_8bit": ("load_in_8bit", bool),
}


def read_facts(folders: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str], list[Path]]:
    """(facts, where each was read, files read), from the nearest folder that has the file."""
    facts: dict[str, Any] = {}
    sources: dict[str, str] = {}
    files: list[Path] = []
    for names, read in (((FACTS_FILE,), _own), (TRL_FILES, _trl)):
        path = next((f / n for f in folders for n in names if (f / n).is_file()), None)
        if path is None:
            continue
        files.append(path)
        for name, value in read(path).items():
            if name not in facts:
                facts[name], sources[name] = value, path.name
    return facts, sources, files


def _own(path: Path) -> dict[str, Any]:
    found = read_json(path)
    unknown = [name for name in found if name not in KNOWN]
    if unknown:
        near = get_close_matches(unknown[0], KNOWN, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{path} has unknown keys {unknown}.{hint} Known keys: {', '.join(KNOWN)}."
        )
    return {name: value for name, value in found.items() if value is not None}


def _trl(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not valid YAML ({error}). Repair or remove it.") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds a {type(found).__name__}; expected keys and values.")
    facts: dict[str, Any] = {}
    for key, (name, convert) in FROM_TRL.items():
        if found.get(key) is None:
            continue
        try:
            facts[name] = convert(found[key])
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: {key} is {found[key]!r}; expected a number. Repair the file."
            ) from error
    # TRL's own default: the upper bound is the lower one unless it is given.
    if "clip_low" in facts:
        facts.setdefault("clip_high", facts["clip_low"])
    if "bf16" in found or "fp16" in found:
        half = "bfloat16" if found.get("bf16") else "float16" if found.get("fp16") else "float32"
        facts["amp_dtype"] = half
    return facts
