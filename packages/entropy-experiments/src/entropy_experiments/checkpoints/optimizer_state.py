"""Adam's and SGD's memory, by parameter name.

torch stores it under integers, in the order in which the parameters were handed over, and loads it
into any model with as many parameters. Here every integer gets a name first, and every moment must
have that parameter's shape. Names come, in this order of trust, from the file itself (state keyed
by name, as FSDP's is, or `param_names` in its groups), from `optimizer_param_names.json`, or from
the orders that trainers are known to use:

    Trainer: parameters that decay, then those that do not, each in named_parameters() order
    plain:   named_parameters() order

What remains untold is which of two parameters of equal shape came first: `not_verifiable` says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from entropy_experiments.checkpoints.dcp_state import read_sharded_optimizer, without_wrapper_names
from entropy_experiments.checkpoints.layout import PARAM_NAMES
from entropy_experiments.checkpoints.torch_files import all_finite, load_safely
from entropy_experiments.checkpoints.verl_folder import is_rank_file
from entropy_experiments.checkpoints.verl_state import read_rank_optimizer
from entropy_experiments.input_errors import read_json_value, short
from entropy_experiments.types import AdamGroup, OptimizerState, SGDGroup

MOMENTS = {
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}
OF_KIND = {"adam": ("amsgrad",), "sgd": ("dampening",)}
"""Options that torch's own Adam, AdamW and SGD always write, and their relatives never."""
RELATIVES = {
    "RAdam": {"weight_decay", "decoupled_weight_decay"},
    "SparseAdam": set[str](),
    "Muon": {"weight_decay", "ns_steps"},
    "NAdam": {"weight_decay", "decoupled_weight_decay", "momentum_decay"},
    "Adamax": {"weight_decay"},
}
"""By which of MARKS they have; before its first step an optimizer is known by its options alone."""
MARKS = {"weight_decay", "decoupled_weight_decay", "momentum_decay", "ns_steps"}
OPTIONS = {
    "adam": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
}
"""Options that the rebuilt step follows."""
NOT_OF_THE_STEP = (
    *("params", "param_names", "name"),
    *("foreach", "capturable", "differentiable", "fused"),
    *("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"),
)
"""Entries of a group that change no step: labels, how torch computes it, notes of schedulers."""
NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""transformers.Trainer's patterns of names that do not decay (tests hold that they are)."""
NO_DECAY_BEFORE_V5 = (r"bias",)
"""Its older rule: LayerNorm modules by class, and biases; RMSNorm weights decayed."""

ORDER_NOTE = "optimizer order:"
LARGEST_STEP = 10**12
"""Nobody trains for longer, and a damaged count may have any number of digits."""

ParamGroup = Mapping[str, Any]
"""An entry of torch's `param_groups`."""
Groups = list[list[str]]


def refuse_zero_lr(lr: float | None, path: Path | str) -> None:
    """Checkpoint k holds the rate of step k + 1, and after the last step there is none."""
    if lr is not None and not lr > 0:
        raise ValueError(
            f"The stored learning rate is {lr:g} in {path} (the last checkpoint of a linear "
            "schedule holds 0); expected above 0. Nothing would move: set update.lr to the rate "
            "of the step you mean."
        )


def read_optimizer_state(
    path: Path | str,
    model: nn.Module,
    *,
    names_path: Path | None = None,
    stored_weights: Mapping[str, Tensor] | None = None,
) -> tuple[OptimizerState, dict[str, Any]]:
    """(state by name, coverage): matched, missing, unused, order, steps, not_verifiable."""
    path = Path(path)
    stored = _read(path, stored_weights)
    if not isinstance(stored, Mapping) or not {"state", "param_groups"} <= set(stored):
        keys = (
            sorted(map(str, stored))[:6] if isinstance(stored, Mapping) else type(stored).__name__
        )
        raise ValueError(
            f"{path} is not an optimizer's state: got {keys}; expected 'state' and 'param_groups', "
            "as torch.save(optimizer.state_dict()) writes them."
        )
    groups, state = stored["param_groups"], stored["state"]
    _check_structure(path, groups, state)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if is_rank_file(path):
        groups = _without_frozen(path, groups, state, model)
    kind = _kind(path, groups, state)
    names, order = _names(path, groups, state, model, named, names_path, kind)
    ids = [i for group in groups for i in group["params"]]
    flat = [name for group in names for name in group]
    entries = {
        name: _entry(path, name, named[name], state[i], kind)
        for i, name in zip(ids, flat, strict=True)
        if state.get(i)
    }
    missing = [name for name in flat if name not in entries]
    if entries and missing:
        raise ValueError(
            f"{path} has no state for {len(missing)} of {len(flat)} parameters: {missing[:5]}. "
            "Expected all, or none before the first step: these were not trained, or the file was "
            "written in part."
        )
    unsure: list[str] = []
    read_groups = tuple(
        _group(path, group, tuple(members), kind, unsure)
        for group, members in zip(groups, names, strict=True)
    )
    _refuse_without_maximum(path, read_groups, entries)
    alike = _alike(named)
    if order not in ("names in the file", PARAM_NAMES) and alike:
        unsure.append(
            f"{ORDER_NOTE} {path.name} does not name its parameters; {alike} of {len(named)} "
            f"share their shape with another and were matched by position ({order} order)"
        )
    steps = sorted({float(entry["step"]) for entry in entries.values() if "step" in entry})
    coverage = {
        "matched": len(entries),
        "parameters": len(named),
        "missing": missing if entries else [],
        "unused": sorted(map(str, set(state) - set(ids))),
        "order": order,
        "steps": steps,
        "not_verifiable": tuple(dict.fromkeys(unsure)),
    }
    return OptimizerState(groups=read_groups, state=entries), coverage  # type: ignore[arg-type]


def _read(path: Path, stored_weights: Mapping[str, Tensor] | None) -> Any:
    if path.is_dir():
        return read_sharded_optimizer(path, stored_weights)
    return read_rank_optimizer(path) if is_rank_file(path) else load_safely(path)


def _without_frozen(
    path: Path, groups: list[Any], state: Mapping[Any, Any], model: nn.Module
) -> list[Any]:
    """verl makes its optimizer of all parameters, frozen ones too, in named_parameters() order.

    Those are taken out where one group has as many as the model, and none of them has a state.
    """
    everything = list(model.named_parameters())
    frozen = [number for number, (_, p) in enumerate(everything) if not p.requires_grad]
    if not frozen or len(groups) != 1 or groups[0]["params"] != list(range(len(everything))):
        return groups
    moved = [everything[number][0] for number in frozen if state.get(number)]
    if moved:
        raise ValueError(
            f"{path} has a state for {len(moved)} parameters that are frozen here, such as "
            f"{moved[0]!r}; expected it for the adapter's alone. Training moved other parameters "
            "than those of its LoRA, or the optimizer belongs to another run."
        )
    kept = [number for number in groups[0]["params"] if number not in set(frozen)]
    return [{**groups[0], "params": kept}]


def _is_count(value: Any) -> bool:
    return 0 <= value <= LARGEST_STEP and float(value).is_integer()


def _check_structure(path: Path, groups: Any, state: Any) -> None:
    """Lists, mappings and numbers where torch has them: a file may hold anything."""

    def refuse(what: str, got: Any, expected: str) -> ValueError:
        return ValueError(
            f"{path}: {what} is a {type(got).__name__}; expected {expected}, as "
            "torch.save(optimizer.state_dict()) writes it. Use another checkpoint."
        )

    if not isinstance(groups, list):
        raise refuse("param_groups", groups, "a list of groups")
    if not isinstance(state, Mapping):
        raise refuse("state", state, "a mapping of parameters")
    for entry in state.values():
        if not isinstance(entry, Mapping):
            raise refuse("an entry of state", entry, "a mapping of moments")
    for group in groups:
        if not isinstance(group, Mapping):
            raise refuse("a parameter group", group, "a mapping")
        params = group.get("params")
        if not isinstance(params, list) or not all(isinstance(i, int | str) for i in params):
            raise refuse("params of a parameter group", params, "a list of ids or names")
        if len(set(params)) < len(params):
            raise ValueError(
                f"{path}: a parameter group names a parameter twice; expected each once. Use "
                "another checkpoint."
            )
        names = group.get("param_names")
        if names is not None and not (
            isinstance(names, list) and all(isinstance(name, str) for name in names)
        ):
            raise refuse("param_names of a parameter group", names, "a list of names")
        betas = group.get("betas", (0.0, 0.0))
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise refuse("betas of a parameter group", betas, "a pair of numbers")
        numbers = {"lr": 0.0, "eps": 0.0, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
        numbers = {key: group.get(key, fine) for key, fine in numbers.items()}
        for key, value in {**numbers, "betas[0]": betas[0], "betas[1]": betas[1]}.items():
            if not _is_number(value):
                raise refuse(f"{key} of a parameter group", value, "a number")


def _is_number(value: Any) -> bool:
    """A float, an int, or a tensor of one: of a capturable optimizer."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(path: Path, groups: Sequence[ParamGroup], state: Mapping[Any, Any]) -> str:
    if not groups:
        raise ValueError(f"{path} has no parameter groups; expected at least one.")
    kind = "adam" if "betas" in groups[0] else "sgd" if "nesterov" in groups[0] else None
    keys = {key for entry in state.values() for key in entry}
    foreign = keys - {"step", *MOMENTS[kind]} if kind else keys
    lacking = [key for group in groups for key in OF_KIND.get(kind or "", ()) if key not in group]
    if lacking:  # moments may have the same names, and be used in another way
        options = set(groups[0])
        named = next((name for name, own in RELATIVES.items() if own == options & MARKS), None)
        raise ValueError(
            f"{path} is the state of an optimizer that cannot be rebuilt: "
            f"{named or 'one'} without {lacking[0]!r} among its options "
            f"{sorted(options - {'params'})}; expected torch's Adam, AdamW or SGD (others can be "
            "probed through their observed step)."
        )
    if kind is None or foreign:
        raise ValueError(
            f"{path} is the state of an optimizer that cannot be rebuilt: it holds "
            f"{sorted(foreign or groups[0])[:6]}; expected torch's Adam, AdamW or SGD (8-bit, "
            "Adafactor and others can be probed through their observed step)."
        )
    _refuse_unknown_options(path, groups, kind)
    return kind


def kind_not_rebuilt(optimizer: torch.optim.Optimizer) -> str:
    """Why the steps of this optimizer cannot be rebuilt from its state; empty: they can."""
    groups = optimizer.param_groups
    state = dict(enumerate(optimizer.state.values()))
    try:
        kind = _kind(Path(type(optimizer).__name__), groups, state)
    except ValueError as error:
        return short(error, 300)
    if kind == "sgd":
        return "the optimizer is SGD; expected Adam or AdamW"
    beta1 = sorted({float(group["betas"][0]) for group in groups})
    if len(beta1) > 1:
        return f"its groups have the beta1 {beta1}; expected one for all"
    return ""


def _refuse_unknown_options(path: Path, groups: Sequence[ParamGroup], kind: str) -> None:
    """A relative of Adam's may have its moments, and options that make another step of them."""
    for group in groups:
        for key, value in group.items():
            if key in OPTIONS[kind] or key in NOT_OF_THE_STEP:
                continue
            if bool(value.any()) if isinstance(value, Tensor) else value:
                known = ", ".join(OPTIONS[kind])
                raise ValueError(
                    f"{path} is the state of an optimizer that cannot be rebuilt: its option "
                    f"{short(key, 40)!r} is {short(value, 40)}; expected torch's own options "
                    f"({known}). An optimizer with others can be probed through its observed step."
                )


def _names(
    path: Path,
    groups: Sequence[ParamGroup],
    state: Mapping[Any, Any],
    model: nn.Module,
    named: Mapping[str, Tensor],
    names_path: Path | None,
    kind: str,
) -> tuple[Groups, str]:
    """The name of every id, group by group, and how it was found."""
    sizes = [len(group["params"]) for group in groups]
    if sum(sizes) != len(named):
        raise ValueError(
            f"{path} is the optimizer of a model of another size: it holds {sum(sizes)} parameters;"
            f" expected {len(named)}, such as {next(iter(named))!r}. It belongs to another run, or "
            f"{_other_parameters(model)}."
        )
    names = _names_in_file(groups, model)
    source = "names in the file"
    if names is None and names_path is not None:
        names, source = _names_beside(names_path, sizes), PARAM_NAMES
    if names is not None:
        flat = [name for group in names for name in group]
        unknown, missing = sorted(set(flat) - set(named)), sorted(set(named) - set(flat))
        if unknown or missing:
            where = path if source == "names in the file" else names_path
            raise ValueError(
                f"{where} names other parameters than the model's: unknown {unknown[:5]}, missing "
                f"{missing[:5]}. It belongs to another model."
            )
        _check_shapes(path, groups, state, names, named, kind)
        return names, source
    tried: list[tuple[str, ValueError]] = []
    for order, candidate in _orders(model, named, sizes):
        try:
            _check_shapes(path, groups, state, candidate, named, kind)
        except ValueError as error:
            tried.append((order, error))
        else:
            return candidate, order
    if tried:
        raise tried[0][1]
    raise ValueError(
        f"{path} has groups of {sizes} parameters, which is no order this program knows: expected "
        f"one group of {len(named)}, or the Trainer's two. Write the names in the optimizer's order"
        f" to {PARAM_NAMES} beside it (a list, or one list per group)."
    )


def _other_parameters(model: nn.Module) -> str:
    """How training may have moved other parameters than the checkpoint suggests."""
    if hasattr(model, "peft_config"):
        return "training moved other modules than the adapter config says"
    return (
        "training froze a part of the model, which a full checkpoint does not say: such a step "
        "cannot be rebuilt from it, and EntropyProbeCallback probes it while it is made"
    )


def _names_in_file(groups: Sequence[ParamGroup], model: nn.Module) -> Groups | None:
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        names = [list(group["params"]) for group in groups]
    elif all("param_names" in group for group in groups if group["params"]):
        names = [list(group.get("param_names", [])) for group in groups]
    else:
        return None
    # A parameter tied to another may be stored under either name.
    canonical = {}
    first: dict[int, str] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        canonical[name] = first.setdefault(id(value), name)
    cleaned = [[without_wrapper_names(name) for name in group] for group in names]
    return [[canonical.get(name, name) for name in group] for group in cleaned]


def _names_beside(path: Path, sizes: Sequence[int]) -> Groups:
    content = read_json_value(
        path,
        advice="Expected a list of parameter names, or one list per group: write it again, or "
        "remove it to have the order inferred",
    )
    if isinstance(content, Mapping):
        content = content.get("param_names", list(content.values()))
    groups = content if isinstance(content, list) else [None]
    if (
        not all(
            isinstance(group, str)
            or (isinstance(group, list) and all(isinstance(name, str) for name in group))
            for group in groups
        )
        or len({type(group) for group in groups}) > 1
    ):
        got = repr(content)
        raise ValueError(
            f"{path} holds {got if len(got) < 80 else got[:77] + '...'}; expected a list of "
            "parameter names, or one list per group. Write it again, or remove it to have the "
            "order inferred."
        )
    if content and all(isinstance(name, str) for name in content):
        names = iter(content)
        split = [
            [without_wrapper_names(name) for _, name in zip(range(size), names)] for size in sizes
        ]
    else:
        split = [[without_wrapper_names(name) for name in group] for group in content]
    if [len(group) for group in split] != list(sizes):
        raise ValueError(
            f"{path} names groups of {[len(group) for group in split]} parameters; the optimizer "
            f"has {list(sizes)}. Expected one name for each, in the optimizer's order."
        )
    return split


def _orders(
    model: nn.Module, named: Mapping[str, Tensor], sizes: Sequence[int]
) -> Iterator[tuple[str, Groups]]:
    """Orders that give groups of these sizes; an empty group fits anywhere."""
    filled = [size for size in sizes if size]
    trainer = [("Trainer", NO_DECAY), ("older Trainer", NO_DECAY_BEFORE_V5)]
    candidates = [("named_parameters", [list(named)])]
    candidates += [(label, trainer_order(model, named, rule)) for label, rule in trainer]
    for label, groups in candidates:
        if [len(group) for group in groups if group] == filled:
            rest = iter(group for group in groups if group)
            yield label, [next(rest) if size else [] for size in sizes]


def trainer_order(
    model: nn.Module, named: Mapping[str, Tensor], patterns: Sequence[str] = NO_DECAY
) -> Groups:
    """transformers.Trainer's grouping: what decays, then what does not."""
    from transformers.trainer_pt_utils import get_parameter_names

    decays = set(get_parameter_names(model, [nn.LayerNorm], list(patterns)))
    return [[n for n in named if n in decays], [n for n in named if n not in decays]]


def _check_shapes(
    path: Path,
    groups: Sequence[ParamGroup],
    state: Mapping[Any, Any],
    names: Groups,
    named: Mapping[str, Tensor],
    kind: str,
) -> None:
    for group, members in zip(groups, names, strict=True):
        for i, name in zip(group["params"], members, strict=True):
            for key in MOMENTS[kind]:
                value = state.get(i, {}).get(key)
                if isinstance(value, Tensor) and value.shape != named[name].shape:
                    raise ValueError(
                        f"{path}: {key} of parameter {i!r} has shape {tuple(value.shape)}; "
                        f"expected {tuple(named[name].shape)} of {name!r}. The optimizer holds "
                        "its parameters in another order, or belongs to a model of another size: "
                        f"write the right order to {PARAM_NAMES}, or give the optimizer that was "
                        "saved with these weights."
                    )


def _entry(
    path: Path, name: str, parameter: Tensor, stored: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for key, value in stored.items():
        if value is None:
            continue
        if key == "step":
            entry[key] = value.clone() if isinstance(value, Tensor) else value
            if not _is_number(value) or not _is_count(value):
                raise ValueError(
                    f"{path}: step of {name!r} is {short(value, 40)}; expected a count of steps, 0 "
                    "or more. The file is damaged or was edited: use another checkpoint."
                )
            continue
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{path}: {key} of {name!r} is a {type(value).__name__}, not a tensor."
            )
        if not value.is_floating_point() or value.layout != torch.strided:
            raise ValueError(
                f"{path}: {key} of {name!r} has dtype {value.dtype} and layout {value.layout}; "
                "expected plain floating point. The file is damaged or was edited: use another "
                "checkpoint."
            )
        if not all_finite(value):
            raise ValueError(
                f"{path}: {key} of {name!r} has {int((~torch.isfinite(value)).sum())} non-finite "
                "values; expected finite numbers. Training diverged before this checkpoint: use an "
                "earlier one."
            )
        if key in ("exp_avg_sq", "max_exp_avg_sq") and bool((value < 0).any()):
            raise ValueError(
                f"{path}: {key} of {name!r} is negative (minimum {float(value.min()):.3g}); "
                "expected squares. The file is corrupt, or its moments were swapped."
            )
        entry[key] = value.to(parameter.device)
    needed = MOMENTS[kind][:2] if kind == "adam" else ()
    lacking = [key for key in ("step", *needed) if kind == "adam" and key not in entry]
    if lacking:
        raise ValueError(
            f"{path}: the state of {name!r} lacks {lacking}; it has {sorted(entry)}. The file was "
            "written in part."
        )
    return entry


def _refuse_without_maximum(
    path: Path,
    groups: Sequence[AdamGroup | SGDGroup],
    entries: Mapping[str, Mapping[str, Any]],
) -> None:
    for group in groups:
        if not isinstance(group, AdamGroup) or not group.amsgrad:
            continue
        for name in group.names:
            if name in entries and "max_exp_avg_sq" not in entries[name]:
                raise ValueError(
                    f"{path}: amsgrad is set and the state of {name!r} lacks max_exp_avg_sq; it "
                    f"has {sorted(entries[name])}. The file was written in part or was edited: use "
                    "another checkpoint."
                )


def _group(
    path: Path,
    group: ParamGroup,
    names: tuple[str, ...],
    kind: str,
    unsure: list[str],
) -> AdamGroup | SGDGroup:
    if kind == "sgd":
        keys = ("lr", "momentum", "dampening", "weight_decay")
        flags = ("nesterov", "maximize")
        return SGDGroup(
            names=names,
            **{key: float(group.get(key, 0.0)) for key in keys},
            **{key: bool(group.get(key, False)) for key in flags},
        )
    lacking = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]
    if lacking:
        raise ValueError(f"{path}: a parameter group lacks {lacking}; it has {sorted(group)}.")
    decay = float(group["weight_decay"])
    if names and decay and "decoupled_weight_decay" not in group:
        unsure.append(
            f"weight decay {decay:g}: {path.name} does not say whether it is AdamW's (taken) or "
            "Adam's"
        )
    decoupled = bool(group.get("decoupled_weight_decay", True))
    adam_group = AdamGroup.of(group, names, decoupled=decoupled)
    _check_range(path, adam_group)
    return adam_group


def _check_range(path: Path, group: AdamGroup) -> None:
    """torch refuses these when an optimizer is made, and loads them without a word."""
    b1, b2 = group.betas
    wrong = {
        "lr": (group.lr, 0 <= group.lr < math.inf, "0 or more"),
        "betas[0]": (b1, 0 <= b1 < 1, "0 or more and below 1"),
        "betas[1]": (b2, 0 <= b2 < 1, "0 or more and below 1"),
        "eps": (group.eps, 0 <= group.eps < math.inf, "0 or more"),
        "weight_decay": (group.weight_decay, 0 <= group.weight_decay < math.inf, "0 or more"),
    }
    for name, (value, right, expected) in wrong.items():
        if not right:
            raise ValueError(
                f"{path}: {name} of a parameter group is {value:g}; expected {expected}. The file "
                "is damaged or was edited: use another checkpoint."
            )


def _alike(named: Mapping[str, Tensor]) -> int:
    """Parameters that share their shape with another one."""
    count = Counter(tuple(value.shape) for value in named.values())
    return sum(n for n in count.values() if n > 1)
