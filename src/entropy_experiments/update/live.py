"""The step that a torch optimizer is about to make, without asking it to make one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.types import AdamGroup, Direction, OptimizerState, Params, SGDGroup
from entropy_experiments.update.adamw import adamw_direction
from entropy_experiments.update.optimizer import read_state
from entropy_experiments.update.sgd import sgd_direction

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def live_direction(
    params: Params, gradient: Mapping[str, Tensor | None], optimizer: torch.optim.Optimizer
) -> Direction:
    """v of the next step, given the gradients as the optimizer will see them.

    `params` must share memory with the tensors that the optimizer holds. A parameter whose gradient
    is None is left alone by torch's optimizers: neither momentum nor decay moves it, nor here.
    """
    moving = {name: params[name] for name, g in gradient.items() if g is not None}
    if not moving:
        raise ValueError(
            f"Not one of {len(gradient)} parameters has a gradient: there is no step to predict. "
            "The probe must be called after backward() and before zero_grad()."
        )
    state = _only(live_state(params, optimizer), moving)
    given = {name: g for name, g in gradient.items() if g is not None}
    build = sgd_direction if isinstance(state.groups[0], SGDGroup) else adamw_direction
    found = build(moving, given, state)

    def whole(part: Params) -> Params:
        return {name: part.get(name, torch.zeros_like(p)) for name, p in params.items()}

    return Direction(
        parts={name: whole(part) for name, part in found.parts.items()},
        lr=found.lr,
        preconditioner=None if found.preconditioner is None else whole(found.preconditioner),
        clip_factor=found.clip_factor,
    )


def live_state(params: Params, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """The optimizer's state by the policy's names, in its own memory: for use before it steps."""
    return _only(read_state(optimizer, _held(params, optimizer), copy=False), params)


def _held(params: Params, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's own tensors by name; they are recognised by the memory they share."""
    name_of = {_place(value): name for name, value in params.items()}
    out = {}
    for group in optimizer.param_groups:
        for position, held in enumerate(group["params"]):
            # A frozen tensor may be in the optimizer too; it has no gradient and does not move.
            out[name_of.get(_place(held), f"(unnamed {id(group)} {position})")] = held
    missing = sorted(set(params) - set(out))
    if missing:
        raise ValueError(
            f"The optimizer does not hold {len(missing)} of {len(params)} trainable parameters: "
            f"{missing[:5]}. Expected the optimizer that trains this model."
        )
    return out


def _place(value: Tensor) -> tuple[int, tuple[int, ...]]:
    return value.data_ptr(), tuple(value.shape)


def _only(state: OptimizerState, moving: Params) -> OptimizerState:
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
            if entry is not None:
                entries[name] = entry
    # A direction is per unit of the first group's rate: one that is 0 (a warm-up) cannot be it.
    groups.sort(key=lambda group: group.lr == 0)
    return OptimizerState(groups=tuple(groups), state=entries)
