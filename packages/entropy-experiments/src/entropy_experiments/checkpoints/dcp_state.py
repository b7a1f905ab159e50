"""What was saved into DCP shards: whose tensors they are, by the names that the model knows.

DCP flattens nested dicts, so a key is a path. Accelerate and the Trainer save {"model": ...} and
{"optimizer": ...} into two folders, `dcp.save` of both into one, PyTorch's own tutorial below one
more key ("app"), and so does prime-rl, where it is "optimizers"; `dcp.save(model.state_dict())`
saves names alone. An optimizer's state is nested ("state", NAME, "exp_avg"), flattened
("state.NAME.exp_avg"), or that of one process, by integers.

prime-rl's LoRA is its own, and counts adapters: `q_proj.lora_A.0` is what peft calls
`base_model.model.q_proj.lora_A.default.weight`. Its names are given peft's form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from entropy_experiments.checkpoints.dcp import ShardedFiles, Steps, read_sharded

MODEL = ("model",)
OPTIMIZER = ("optimizer", "optim", "optimizers")
FLAT_OPTIMIZER = ("state.", "param_groups.")
COUNTED_LORA = re.compile(r"\.(lora_[AB])\.0$")
PEFT = "base_model.model."
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")

Section = dict[Steps, str]


class StoredWeights(Mapping[str, Tensor]):
    """Tensors by the model's names; each is read whenever it is asked for."""

    def __init__(self, files: ShardedFiles, keys: Mapping[str, str]) -> None:
        self.files, self._keys = files, keys

    def __getitem__(self, name: str) -> Tensor:
        return self.files.tensor(self._keys[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """From the table of contents: nothing is read."""
        return {name: self.files.tensors[key].shape for name, key in self._keys.items()}

    def __len__(self) -> int:
        return len(self._keys)


def read_sharded_weights(folder: Path) -> StoredWeights:
    files = read_sharded(folder)
    section = _model(files)
    rename = _pefts_names(files)
    keys: dict[str, str] = {}
    for steps, key in section.items():
        name = rename(without_wrapper_names(".".join(map(str, steps))))
        if key in files.values or name in keys:
            got = "is not a tensor" if key in files.values else "is there twice"
            raise ValueError(
                f"{folder}: {key!r} {got}; expected the model's tensors, each once. Save the "
                "model's state_dict() under 'model', and other things beside it."
            )
        keys[name] = key
    if not keys:
        raise ValueError(
            f"{folder} holds no model: its keys are {_some(files)}. Expected 'model' with the "
            "parameters by name, as Accelerate and dcp.save({'model': ...}) write it."
        )
    return StoredWeights(files, keys)


def holds_optimizer(stored: Mapping[str, Tensor] | None) -> bool:
    """Whether the folder of these weights holds an optimizer, too."""
    return isinstance(stored, StoredWeights) and bool(_optimizer(stored.files))


def read_sharded_optimizer(
    folder: Path, stored: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """`state` and `param_groups`, as torch.save(optimizer.state_dict()) would hold them.

    `stored`: weights whose table of contents was read already, perhaps of the same folder.
    """
    files = stored.files if isinstance(stored, StoredWeights) else None
    if files is None or files.folder != folder:
        files = read_sharded(folder)
    section = _optimizer(files)
    if not section:
        raise ValueError(
            f"{folder} holds no optimizer: its keys are {_some(files)}. Expected 'optimizer' (or "
            "'optim') with 'state' and 'param_groups', as Accelerate and dcp.save write it."
        )
    rename = _pefts_names(files)
    state: dict[Any, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for steps, key in section.items():
        match steps:
            case ("state", str(name), str(what)):
                state.setdefault(name, {})[what] = _read(files, key)
            case ("param_groups", int(number), str(what)):
                groups.setdefault(number, {})[what] = _read(files, key)
            case ("param_groups",):  # torch before 2.4
                listed = _read(files, key)
                if not isinstance(listed, list) or not all(isinstance(g, dict) for g in listed):
                    raise _foreign(folder, key)
                groups |= enumerate(listed)
            case (str(flat),) if flat.startswith(FLAT_OPTIMIZER):
                kind, rest = flat.split(".", 1)
                name, _, what = rest.rpartition(".")
                target = state if kind == "state" else by_name
                target.setdefault(name, {})[what] = _read(files, key)
            case _:
                raise _foreign(folder, key)
    listed_groups = [groups[number] for number in sorted(groups)] if groups else _grouped(by_name)
    if sorted(groups) != list(range(len(groups))) or not all("params" in g for g in listed_groups):
        raise ValueError(
            f"{folder}: the parameter groups {sorted(groups)} are not whole; expected 0, 1, ..., "
            "each with 'params'. The checkpoint was written in part."
        )
    state = {rename(name): entry for name, entry in state.items()}
    for group in listed_groups:
        if isinstance(group["params"], list):
            group["params"] = [rename(name) for name in group["params"]]
    if any(isinstance(one, int) for group in listed_groups for one in group["params"]):
        # Paths are text; the optimizer of one process counts.
        state = {int(name) if str(name).isdecimal() else name: e for name, e in state.items()}
    return {"state": state, "param_groups": listed_groups}


def without_wrapper_names(name: str) -> str:
    """A parameter's name without the layers that FSDP, activation checkpointing, torch.compile
    and DDP put around modules; for weights and for optimizer state alike."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def _pefts_names(files: ShardedFiles) -> Callable[[Any], Any]:
    """What to call a parameter: as it is saved, but of prime-rl's LoRA as peft does."""
    if not any(COUNTED_LORA.search(key) for key in files.tensors):
        return lambda name: name

    def rename(name: Any) -> Any:
        if not isinstance(name, str) or name.startswith(PEFT):
            return name
        return PEFT + COUNTED_LORA.sub(r".\1.default.weight", name)

    return rename


def _foreign(folder: Path, key: str) -> ValueError:
    return ValueError(
        f"{folder}: {key!r} is no part of an optimizer's state; expected 'state' by parameter and "
        "'param_groups'. Save optimizer.state_dict(), or what get_optimizer_state_dict gives."
    )


def _read(files: ShardedFiles, key: str) -> Any:
    return files.tensor(key) if key in files.tensors else files.value(key)


def _grouped(by_name: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Flattened states repeat the settings for every parameter: equal ones are a group."""
    groups: list[dict[str, Any]] = []
    for name, settings in by_name.items():
        same = next((g for g in groups if {**g, "params": 0} == {**settings, "params": 0}), None)
        if same is None:
            groups.append({**settings, "params": [name]})
        else:
            same["params"].append(name)
    return groups


def _roots(files: ShardedFiles) -> Section:
    """Paths, without a key around everything (as in {"app": {"model": ..., "optim": ...}})."""
    section = {steps: key for key, steps in files.paths.items()}
    around = {steps[0] for steps in section}
    if len(around) == 1 and not around & {*MODEL, *OPTIMIZER}:
        below = {steps[1] for steps in section if len(steps) > 1}
        if below & {*MODEL, *OPTIMIZER}:
            return {steps[1:]: key for steps, key in section.items() if len(steps) > 1}
    return section


def _below(section: Section, names: tuple[str, ...]) -> Section:
    return {s[1:]: key for s, key in section.items() if s[0] in names and len(s) > 1}


def _model(files: ShardedFiles) -> Section:
    section = _roots(files)
    below = _below(section, MODEL)
    if below or _below(section, OPTIMIZER):
        return below
    return {
        steps: key
        for steps, key in section.items()
        if len(steps) == 1 and key in files.tensors and not key.startswith(FLAT_OPTIMIZER)
    }


def _optimizer(files: ShardedFiles) -> Section:
    section = _roots(files)
    below = _below(section, OPTIMIZER)
    if below or _below(section, MODEL):
        return below
    nested = {s: k for s, k in section.items() if s[0] in ("state", "param_groups")}
    flat = {s: k for s, k in section.items() if len(s) == 1 and k.startswith(FLAT_OPTIMIZER)}
    return nested or flat


def _some(files: ShardedFiles) -> list[str]:
    return sorted(files.paths)[:6]
