"""The SGD step rebuilt exactly: the second optimizer that keeps the interface honest.

    d = c g + weight_decay theta        buf' = momentum buf + (1 - dampening) d    (first step: d)
    v = -buf',   nesterov: v = -(d + momentum buf')

Everything is linear in buf, theta and g, so the parts are read off the coefficients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from entropy_experiments.types import Direction, OptimizerState, Params, SGDGroup
from entropy_experiments.update.gradient import clip_factor
from entropy_experiments.update.optimizer import direction_like, members


def sgd_direction(
    params: Params,
    gradient: Params,
    optimizer: OptimizerState,
    *,
    max_grad_norm: float | None = None,
) -> Direction:
    """The step of SGD on a loss gradient, per unit learning rate.

    Args:
        params: Parameters before the step.
        gradient: The loss gradient, before clipping.
        optimizer: Its state before the step.
        max_grad_norm: Of gradient clipping; None: none.

    Returns:
        The direction with its parts momentum, decay and gradient.

    Examples:
        >>> import torch
        >>> params = {"w": torch.ones(2, requires_grad=True)}
        >>> state = read_state(torch.optim.SGD(params.values(), lr=0.1, momentum=0.9), params)
        >>> sgd_direction(params, {"w": torch.tensor([1.0, -2.0])}, state).total["w"].tolist()
        [-1.0, 2.0]
    """
    factor, _ = clip_factor(gradient, max_grad_norm)
    parts: dict[str, dict[str, Tensor]] = {"momentum": {}, "decay": {}, "gradient": {}}
    preconditioner: dict[str, Tensor] = {}
    for name, group, scale in members(params, gradient, optimizer, SGDGroup):
        theta, g = params[name].detach().double(), gradient[name].detach().double()
        buffer = optimizer.state.get(name, {}).get("momentum_buffer")
        if not group.momentum:
            of_buffer, of_d = 0.0, 1.0
        elif buffer is None:
            of_buffer, of_d = 0.0, 1.0 + (group.momentum if group.nesterov else 0.0)
        else:
            nesterov = group.momentum if group.nesterov else 1.0
            of_buffer = nesterov * group.momentum
            of_d = nesterov * (1 - group.dampening) + (1.0 if group.nesterov else 0.0)
        past = torch.zeros_like(theta) if buffer is None else buffer.detach().double()
        sign = -1.0 if group.maximize else 1.0
        parts["momentum"][name] = -scale * of_buffer * past
        parts["decay"][name] = -scale * of_d * group.weight_decay * theta
        parts["gradient"][name] = -scale * of_d * sign * factor * g
        preconditioner[name] = torch.full_like(theta, scale * of_d * sign)
    return direction_like(params, parts, optimizer.lr, preconditioner, factor)
