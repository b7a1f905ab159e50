"""The AdamW step rebuilt exactly, as a direction per unit learning rate and its parts.

    m' = b1 m + (1 - b1) c g        s' = b2 s + (1 - b2) (c g)^2
    den = sqrt(s' / (1 - b2^t)) + eps            (amsgrad: with the running maximum of s')
    v = -m' / ((1 - b1^t) den) - weight_decay theta

    momentum  -b1 m / ((1 - b1^t) den)      decay  -weight_decay theta
    gradient  -P c g,   P = (1 - b1) / ((1 - b1^t) den)

Groups with other learning rates are scaled by lr_group / eta, eta the first group's. Adam's
coupled decay joins g after clipping and reaches theta through P. Arithmetic is fp64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.numerics.derivatives import dot, norm
from entropy_experiments.types import (
    AdamGroup,
    Direction,
    OptimizerState,
    Params,
    Policy,
    UpdateBatch,
)
from entropy_experiments.types.direction import BASELINE_PARTS
from entropy_experiments.update.gradient import LossGradient, clip_factor, loss_gradient
from entropy_experiments.update.objective import Objective
from entropy_experiments.update.optimizer import direction_like, direction_of, members


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateStats:
    """What was done on the way to the direction."""

    loss: float
    step: float
    """Steps the optimizer had made; 0 means that there was no state, hence no momentum."""
    grad_norm: float
    clipped_norm: float
    clip_factor: float
    microbatches: int
    precision: Mapping[str, str]
    part_norms: Mapping[str, float]
    shares: Mapping[str, Mapping[str, float]] = field(repr=False)
    """For every part, each parameter's share of its squared norm."""
    found: LossGradient = field(repr=False)
    """The gradient itself, and the update rollouts' scores."""


def compute_update_vector_adamw(
    policy: Policy,
    batch: UpdateBatch,
    objective: Objective,
    optimizer: OptimizerState,
    *,
    max_grad_norm: float | None = None,
    microbatch: int = 8,
) -> tuple[Direction, Direction, UpdateStats]:
    """(direction, baseline, stats) of the step that `batch` would make.

    Args:
        policy: Parameters before the step.
        batch: What the step learns from.
        objective: The loss.
        optimizer: Adam or AdamW before the step.
        max_grad_norm: Of gradient clipping; None: none.
        microbatch: Rollouts in a pass.

    Returns:
        The step per unit learning rate; its baseline, momentum and weight decay, which is what the
        optimizer would do with a zero gradient; and what was done on the way.

    Raises:
        ValueError: If the update is zero.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> batch = policy.update_batch(seed=1)
        >>> adamw = torch.optim.AdamW(policy.params.values(), lr=0.02)
        >>> state = read_state(adamw, policy.params)
        >>> update = compute_update_vector_adamw(policy, batch, Objective(), state)
        >>> direction, baseline, stats = update
        >>> sorted(direction.parts), sorted(baseline.parts), round(stats.grad_norm, 4)
        (['decay', 'gradient', 'momentum'], ['decay', 'momentum'], 0.0458)
    """
    gradient = loss_gradient(policy, batch, objective, microbatch=microbatch)
    direction = adamw_direction(
        policy.params, gradient.gradient, optimizer, max_grad_norm=max_grad_norm
    )
    return (*_with_baseline(direction), _stats(policy, direction, gradient, optimizer))


def update_of_gradient(
    policy: Policy,
    gradient: Params,
    found: LossGradient,
    optimizer: OptimizerState,
) -> tuple[Direction, Direction, UpdateStats]:
    """The same of a gradient that training used: clipped, averaged, whatever its loss was.

    A parameter that `gradient` lacks had none, and torch's optimizers leave it alone. `found`: the
    gradient rebuilt from the batch, whose loss and scores the statistics keep.
    """
    direction = direction_of(policy.params, gradient, optimizer, adamw_direction)
    stats = _stats(policy, direction, found, optimizer)
    used = norm(gradient)
    share = used / stats.grad_norm if stats.grad_norm else 1.0
    return (*_with_baseline(direction), replace(stats, clipped_norm=used, clip_factor=share))


def _with_baseline(direction: Direction) -> tuple[Direction, Direction]:
    if all(norm(part) == 0 for part in direction.parts.values()):
        raise ValueError(
            "The update is zero: no token has an advantage (every group has equal rewards) and "
            "there is neither momentum nor weight decay. Draw rollouts until a group's rewards "
            "differ, or load the optimizer state."
        )
    return direction, direction.only(*BASELINE_PARTS)


def _stats(
    policy: Policy, direction: Direction, gradient: LossGradient, optimizer: OptimizerState
) -> UpdateStats:
    _, grad_norm = clip_factor(gradient.gradient, None)
    part_norms = {name: norm(part) for name, part in direction.parts.items()}
    return UpdateStats(
        loss=gradient.loss,
        step=max((float(entry.get("step", 0)) for entry in optimizer.state.values()), default=0.0),
        grad_norm=grad_norm,
        clipped_norm=grad_norm * direction.clip_factor,
        clip_factor=direction.clip_factor,
        microbatches=gradient.microbatches,
        precision={
            "parameters": str(next(iter(policy.params.values())).dtype),
            "matmul": torch.get_float32_matmul_precision(),
        },
        part_norms=part_norms,
        shares={
            part: {
                name: dot({name: value}, {name: value}) / part_norms[part] ** 2
                for name, value in params.items()
            }
            for part, params in direction.parts.items()
            if part_norms[part] > 0
        },
        found=gradient,
    )


def adamw_direction(
    params: Params,
    gradient: Params,
    optimizer: OptimizerState,
    *,
    max_grad_norm: float | None = None,
) -> Direction:
    """The step of Adam or AdamW on a loss gradient, per unit learning rate.

    Args:
        params: Parameters before the step.
        gradient: The loss gradient, before clipping.
        optimizer: Its state before the step.
        max_grad_norm: Of gradient clipping; None: none.

    Returns:
        The direction with its parts momentum, decay and gradient, and the preconditioner.

    Raises:
        ValueError: If state and parameters do not fit together.

    Examples:
        >>> import torch
        >>> params = {"w": torch.ones(2, requires_grad=True)}
        >>> state = read_state(torch.optim.AdamW(params.values(), weight_decay=0.5), params)
        >>> step = adamw_direction(params, {"w": torch.tensor([1.0, -2.0])}, state)
        >>> step.decay["w"].tolist(), step.gradient["w"].round(decimals=3).tolist()
        ([-0.5, -0.5], [-1.0, 1.0])
    """
    factor, _ = clip_factor(gradient, max_grad_norm)
    parts: dict[str, dict[str, Tensor]] = {"momentum": {}, "decay": {}, "gradient": {}}
    preconditioner: dict[str, Tensor] = {}
    for name, group, scale in members(params, gradient, optimizer, AdamGroup):
        theta, g = params[name].detach().double(), gradient[name].detach().double()
        (b1, b2), state = group.betas, optimizer.state.get(name, {})
        t = float(state.get("step", 0.0)) + 1
        m = moment_of(state, "exp_avg", name, theta)
        s = moment_of(state, "exp_avg_sq", name, theta)
        sign = -1.0 if group.maximize else 1.0
        seen = sign * factor * g
        coupled = 0.0 if group.decoupled else group.weight_decay
        s = b2 * s + (1 - b2) * (seen + coupled * theta) ** 2
        if group.amsgrad:
            s = torch.maximum(moment_of(state, "max_exp_avg_sq", name, theta), s)
        corrected_den = (1 - b1**t) * ((s / (1 - b2**t)).sqrt() + group.eps)
        p = scale * (1 - b1) / corrected_den
        decay = -p * coupled if coupled else -scale * group.weight_decay
        parts["momentum"][name] = -scale * b1 * m / corrected_den
        parts["decay"][name] = decay * theta
        parts["gradient"][name] = -p * seen
        preconditioner[name] = sign * p
    return direction_like(params, parts, optimizer.lr, preconditioner, factor)


def moment_of(state: Mapping[str, Any], key: str, name: str, theta: Tensor) -> Tensor:
    if not state:
        return torch.zeros_like(theta)
    if key not in state:
        raise ValueError(f"The optimizer state of {name!r} has no {key!r}; it has {sorted(state)}.")
    value = state[key]
    if value.shape != theta.shape:
        raise ValueError(
            f"{key} of {name!r} has shape {tuple(value.shape)}; the parameter has "
            f"{tuple(theta.shape)}. The state belongs to another parameter."
        )
    return value.detach().to(theta.device, torch.float64)
