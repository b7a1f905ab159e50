"""The step that a torch optimizer is about to make, without asking it to make one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from entropy_experiments.types import Direction, OptimizerState, Params
from entropy_experiments.update.optimizer import direction_of, moving_part, read_state
from entropy_experiments.update.rebuilt import rebuilt_direction


def live_direction(
    params: Params, gradient: Mapping[str, Tensor | None], optimizer: torch.optim.Optimizer
) -> Direction:
    """v of the next step, given the gradients as the optimizer will see them.

    `params` must share memory with the tensors that the optimizer holds. A parameter whose gradient
    is None is left alone by torch's optimizers: neither momentum nor decay moves it, nor here.
    """
    given = {name: g for name, g in gradient.items() if g is not None}
    if not given:
        raise ValueError(
            f"Not one of {len(gradient)} parameters has a gradient: there is no step to predict. "
            "The probe must be called after backward() and before zero_grad()."
        )
    if unknown := sorted(given.keys() - params.keys()):
        raise ValueError(
            f"{len(unknown)} parameters have a gradient now and were frozen when the probe was set "
            f"up: {unknown[:5]}. Expected the same trainable parameters at every step. Make a new "
            "probe after unfreezing them."
        )
    state = live_state(params, optimizer)
    return direction_of(params, given, state, rebuilt_direction)


def live_state(params: Params, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """The optimizer's state by the policy's names, in its own memory: for use before it steps."""
    return moving_part(read_state(optimizer, _held(params, optimizer), copy=False), params)


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
