"""Optimizer state by parameter name, and what every rebuilt step shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.types import (
    AdamGroup,
    Direction,
    OptimizerState,
    Params,
    SGDGroup,
    check_params,
)
from entropy_experiments.types.direction import check_finite

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
TORCH_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Torch's classes whose next step can be rebuilt."""
SGD_KEYS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")


def read_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], *, copy: bool = True
) -> OptimizerState:
    """The state of torch's Adam, AdamW or SGD, by parameter name.

    Args:
        optimizer: As it is before the step.
        names: The very tensors it was built with, by name, such as
            `dict(model.named_parameters())`.
        copy: False shares the optimizer's memory: for use before its next step only.

    Returns:
        Hyper-parameters by group, and state by name.

    Raises:
        TypeError: If `names` is no mapping, or the optimizer is of another kind.
        ValueError: If the optimizer has parameters that are not among the names.

    Examples:
        >>> import torch
        >>> params = {"w": torch.ones(2, requires_grad=True)}
        >>> read_state(torch.optim.AdamW(params.values(), lr=3e-4), params).lr
        0.0003
    """
    if not isinstance(names, Mapping):
        raise TypeError(
            f"Got a {type(names).__name__} of names; expected a mapping from name to tensor, such "
            "as dict(model.named_parameters())."
        )
    name_of = {id(value): name for name, value in names.items()}
    groups: list[Any] = []
    state: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        unknown = sum(id(p) not in name_of for p in group["params"])
        if unknown:
            raise ValueError(
                f"{unknown} of {len(group['params'])} parameters of an optimizer group are not "
                "among the named ones. Pass the very tensors that the optimizer was built with."
            )
        group_names = tuple(name_of[id(p)] for p in group["params"])
        groups.append(_group(optimizer, group, group_names))
        for name in group_names:
            entry = {
                key: _own(value, copy) if isinstance(value, Tensor) else value
                for key, value in optimizer.state.get(names[name], {}).items()
                if value is not None
            }
            if entry:
                state[name] = entry
    return OptimizerState(groups=tuple(groups), state=state)


def own_step(optimizer: torch.optim.Optimizer) -> str:
    """Why torch's step may not be this optimizer's: its class has another; empty: it has not."""
    kind = type(optimizer)
    # torch wraps the step of every class for its profiler; below that is the class's own.
    if unwrap(kind.step).__module__.partition(".")[0] == "torch":
        return ""
    base = next(c for c in kind.__mro__ if c.__module__.partition(".")[0] == "torch")
    return (
        f"the optimizer is a {kind.__name__}, a subclass of {base.__name__} with a step() of its "
        f"own, and {base.__name__}'s step was taken for it"
    )


def _own(value: Tensor, copy: bool) -> Tensor:
    return value.detach().clone() if copy else value.detach()


def _group(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], names: tuple[str, ...]
) -> AdamGroup | SGDGroup:
    if not isinstance(optimizer, TORCH_OPTIMIZERS):
        raise TypeError(
            f"Got {type(optimizer).__name__}; expected torch's Adam, AdamW or SGD. Other "
            "optimizers can be judged by the step they made: entropy_experiments.observed()."
        )
    if isinstance(optimizer, torch.optim.SGD):
        return SGDGroup(names=names, **{key: group[key] for key in SGD_KEYS})
    # Before torch 2.8 only the class tells the two kinds of decay apart.
    adamw = isinstance(optimizer, torch.optim.AdamW)
    decoupled = adamw or bool(group.get("decoupled_weight_decay", False))
    return AdamGroup.of(group, names, decoupled=decoupled)


def members(
    params: Params, gradient: Params, optimizer: OptimizerState, kind: type
) -> Iterator[tuple[str, Any, float]]:
    """(name, group, lr_group / eta) of every parameter, after checking that all fit together."""
    checked = list(groups_by_name(params, gradient, optimizer, kind))
    if not optimizer.lr > 0:
        raise ValueError(
            f"The optimizer's learning rate is {optimizer.lr}: the last checkpoint of a schedule "
            "stores 0. Give the first group the `lr` of the step in question."
        )
    for name, group in checked:
        yield name, group, group.lr / optimizer.lr


def groups_by_name(
    params: Params, gradient: Params, optimizer: OptimizerState, kind: type
) -> Iterator[tuple[str, Any]]:
    """(name, group) of every parameter, after the same checks; a rate of 0 is one."""
    if not isinstance(optimizer, OptimizerState):
        raise TypeError(
            f"Got a {type(optimizer).__name__} as optimizer; expected an OptimizerState. Make one "
            "of a torch optimizer with read_state(optimizer, dict(model.named_parameters()))."
        )
    check_params("gradient", gradient, params)
    check_finite("gradient", gradient)
    wrong = [type(g).__name__ for g in optimizer.groups if not isinstance(g, kind)]
    if wrong:
        raise ValueError(f"Got optimizer groups of type {wrong[0]}; expected {kind.__name__}.")
    covered = {name for group in optimizer.groups for name in group.names}
    if covered != set(params):
        missing, foreign = sorted(set(params) - covered), sorted(covered - set(params))
        raise ValueError(
            f"The optimizer does not hold the policy's parameters: missing {missing[:5]}, unknown "
            f"{foreign[:5]}. Its state belongs to another model or was matched by position."
        )
    stateless = sorted(covered - set(optimizer.state))
    if optimizer.state and stateless:
        raise ValueError(
            f"The optimizer has state for {len(optimizer.state)} of {len(covered)} parameters; "
            f"missing {stateless[:5]}. Expected all (or none, before the first step)."
        )
    for group in optimizer.groups:
        for name in group.names:
            yield name, group


def direction_like(
    params: Params,
    parts: Mapping[str, Mapping[str, Tensor]],
    lr: float,
    preconditioner: Mapping[str, Tensor],
    factor: float,
) -> Direction:
    """A Direction in the parameters' own order and dtype."""

    def cast(values: Mapping[str, Tensor]) -> Params:
        return {name: values[name].to(theta.dtype) for name, theta in params.items()}

    return Direction(
        parts={name: cast(values) for name, values in parts.items()},
        lr=lr,
        preconditioner=cast(preconditioner),
        clip_factor=factor,
    )


def direction_of(
    params: Params,
    gradient: Params,
    state: OptimizerState,
    build: Callable[[Params, Params, OptimizerState], Direction],
) -> Direction:
    """The step of a gradient; parameters that it lacks are left alone, as torch does."""
    moving = {name: params[name] for name in gradient}
    direction = build(moving, gradient, moving_part(state, moving))

    def whole(part: Params) -> Params:
        return {name: part.get(name, torch.zeros_like(p)) for name, p in params.items()}

    return Direction(
        parts={name: whole(part) for name, part in direction.parts.items()},
        lr=direction.lr,
        preconditioner=None
        if direction.preconditioner is None
        else whole(direction.preconditioner),
        clip_factor=direction.clip_factor,
    )


def moving_part(state: OptimizerState, moving: Params) -> OptimizerState:
    """The part of the optimizer that will move."""
    groups: list[Any] = []
    entries = {}
    for group in state.groups:
        kept = tuple(name for name in group.names if name in moving)
        if kept:
            groups.append(replace(group, names=kept))
        for name in kept:
            entry = state.state.get(name)
            if entry is None and state.state and isinstance(group, AdamGroup):
                # It gets its first gradient now, steps after the others: it starts from zero.
                zero = torch.zeros_like(moving[name])
                entry = {"step": 0.0, **dict.fromkeys(ADAM_MOMENTS, zero)}
            elif entry is None and state.state:
                entry = {}  # SGD's buffer begins as the gradient itself
            if entry is not None:
                entries[name] = entry
    # A direction is per unit of the first group's rate: one that is 0 (a warm-up) cannot be it.
    groups.sort(key=lambda group: group.lr == 0)
    return OptimizerState(groups=tuple(groups), state=entries)
