"""Document 002's `AdamPreconditioner`; the home is `update.adamw` (`Direction.preconditioner`).

    P = (1 - b1) / ((1 - b1^t) den)         a loss gradient g moves theta by -lr P g

The denominator holds the squared gradient itself, so P depends on the gradient it is applied to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from entropy_experiments.types import Direction, OptimizerState, Params
from entropy_experiments.update.adamw import adamw_direction
from entropy_experiments.update.optimizer import read_state


class AdamPreconditioner:
    """What a saved or live Adam or AdamW makes of a gradient, by parameter name."""

    def __init__(
        self, optimizer: OptimizerState | torch.optim.Optimizer, params: Mapping[str, Tensor]
    ) -> None:
        """`params`: for a torch optimizer the very tensors it was built with, by name."""
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = read_state(optimizer, params)
        self.optimizer, self.params = optimizer, params

    def direction(self, gradient: Params, *, max_grad_norm: float | None = None) -> Direction:
        """The whole step per unit learning rate: momentum, decay and gradient."""
        return adamw_direction(self.params, gradient, self.optimizer, max_grad_norm=max_grad_norm)

    def apply_preconditioner(self, gradient: Params) -> Params:
        """P g by parameter name: minus the step's gradient part."""
        return {name: -value for name, value in self.direction(gradient).gradient.items()}
