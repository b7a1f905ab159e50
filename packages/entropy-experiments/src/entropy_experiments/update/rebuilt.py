"""The step of whichever optimizer this is: one row for each whose step is rebuilt."""

from __future__ import annotations

from typing import Protocol

from entropy_experiments.types import AdamGroup, Direction, OptimizerState, Params, SGDGroup
from entropy_experiments.update.adamw import adamw_direction
from entropy_experiments.update.sgd import sgd_direction


class StepFunction(Protocol):
    def __call__(
        self,
        params: Params,
        gradient: Params,
        optimizer: OptimizerState,
        *,
        max_grad_norm: float | None = None,
    ) -> Direction: ...


STEP_FUNCTIONS: dict[type, StepFunction] = {
    AdamGroup: adamw_direction,
    SGDGroup: sgd_direction,
}
"""By the class of the optimizer's groups."""


def rebuilt_direction(
    params: Params,
    gradient: Params,
    optimizer: OptimizerState,
    *,
    max_grad_norm: float | None = None,
) -> Direction:
    """The optimizer's step on a loss gradient, per unit learning rate."""
    step = STEP_FUNCTIONS[type(optimizer.groups[0])]
    return step(params, gradient, optimizer, max_grad_norm=max_grad_norm)
