"""The optimizer's step as a recursion that is linear in what enters it.

    d_t = c_t g_t + coupled weight_decay theta_t                (maximize: -c_t g_t)
    m_t = rho m_{t-1} + alpha d_t
    theta_{t+1} - theta_t = -(K_t m_t + N_t d_t) - lr decoupled weight_decay theta_t

    Adam, AdamW   rho = b1    alpha = 1 - b1           K = lr / ((1 - b1^n) den)      N = 0
    SGD           rho = momentum  alpha = 1 - dampening (first step: 1)   K = lr       N = 0
    nesterov      the same                              K = momentum lr               N = lr

den (with amsgrad's running maximum) and the clip factor c are those of the step as it was made.
What a gradient does in later steps is then a product of rho and K: `attribution.run_ledger`.
`advanced` makes the step and returns the state after it, so that steps between two checkpoints can
be made again (replay). Arithmetic is fp64; results have the dtype of what they replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.types import AdamGroup, OptimizerState, Params, SGDGroup
from entropy_experiments.update.adamw import moment_of
from entropy_experiments.update.gradient import clip_factor
from entropy_experiments.update.optimizer import groups_by_name

TINY_SHARE = 1e-17


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterRecursion:
    """The recursion of one parameter; tensors are fp64."""

    rho: float
    alpha: float
    gain: Tensor
    """K."""
    direct: float
    """N."""
    later: float
    """What the moment after the step does in all later ones together, over what it does in this
    one, with learning rate and denominator held and no gradient entering."""
    sign: float
    """-1 where the optimizer ascends."""
    coupled: float
    """Weight decay that joins the gradient."""
    decoupled: float
    """lr times the weight decay that acts on theta itself."""
    before: Tensor
    """m_{t-1}."""
    after: Tensor
    """m_t."""
    state: Mapping[str, Any]
    """The optimizer's entry after the step, under torch's keys."""
    change: Tensor
    """theta_{t+1} - theta_t."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRecursion:
    """One step of the optimizer, parameter by parameter."""

    parameters: Mapping[str, ParameterRecursion]
    clip_factor: float
    grad_norm: float

    @property
    def change(self) -> dict[str, Tensor]:
        """theta_{t+1} - theta_t, as the optimizer makes it."""
        return {name: one.change for name, one in self.parameters.items()}

    @property
    def moment_after(self) -> dict[str, Tensor]:
        return {name: one.after for name, one in self.parameters.items()}


def step_recursion(
    params: Params,
    gradient: Params,
    optimizer: OptimizerState,
    *,
    max_grad_norm: float | None = None,
) -> StepRecursion:
    """The step of Adam, AdamW or SGD on a loss gradient, as a linear recursion.

    Args:
        params: Parameters before the step.
        gradient: The loss gradient, before clipping.
        optimizer: Its state before the step.
        max_grad_norm: Of gradient clipping; None: none.

    Returns:
        Coefficients, moments before and after, and the change of every parameter.

    Raises:
        ValueError: If state and parameters do not fit together, or momentum is 1 or more, so that
            a gradient would never cease to act.

    Examples:
        >>> import torch
        >>> params = {"w": torch.ones(2, dtype=torch.float64, requires_grad=True)}
        >>> state = read_state(torch.optim.SGD(params.values(), lr=0.1, momentum=0.9), params)
        >>> step = step_recursion(params, {"w": torch.tensor([1.0, -2.0])}, state)
        >>> step.change["w"].tolist(), step.parameters["w"].rho
        ([-0.1, 0.2], 0.9)
    """
    factor, size = clip_factor(gradient, max_grad_norm)
    group_kind = type(optimizer.groups[0])
    if group_kind not in _RECURSIONS:
        raise ValueError(
            f"Got optimizer groups of type {group_kind.__name__}; expected AdamGroup or SGDGroup: "
            "only Adam, AdamW and SGD are known as a recursion."
        )
    parameters = {
        name: _RECURSIONS[group_kind](
            name,
            params[name].detach().double(),
            gradient[name].detach().double() * factor,
            group,
            optimizer.state.get(name, {}),
            params[name].dtype,
        )
        for name, group in groups_by_name(params, gradient, optimizer, group_kind)
    }
    ordered = {name: parameters[name] for name in params}
    return StepRecursion(parameters=ordered, clip_factor=factor, grad_norm=size)


def advanced(
    params: Params, optimizer: OptimizerState, step: StepRecursion
) -> tuple[dict[str, Tensor], OptimizerState]:
    """Parameters and optimizer state after the step, each in its own dtype.

    Args:
        params: Parameters before the step.
        optimizer: Its state before the step.
        step: Of these.

    Returns:
        What the next step starts from; learning rates are unchanged.
    """
    moved = {
        name: (theta.detach().double() + step.parameters[name].change).to(theta.dtype)
        for name, theta in params.items()
    }
    state = {name: one.state for name, one in step.parameters.items() if one.state}
    return moved, OptimizerState(groups=optimizer.groups, state=state)


def first_moment(optimizer: OptimizerState, params: Params) -> dict[str, Tensor]:
    """m by parameter in fp64: Adam's exp_avg, SGD's buffer; zero before the first step."""
    return {name: _first_of(optimizer.state.get(name, {}), theta) for name, theta in params.items()}


def _first_of(entry: Mapping[str, Any], theta: Tensor) -> Tensor:
    moment = entry.get("exp_avg", entry.get("momentum_buffer"))
    if moment is None:
        return torch.zeros_like(theta, dtype=torch.float64)
    return moment.detach().to(theta.device, torch.float64)


def _adam(
    name: str,
    theta: Tensor,
    g: Tensor,
    group: AdamGroup,
    state: Mapping[str, Any],
    dtype: torch.dtype,
) -> ParameterRecursion:
    b1, b2 = group.betas
    _refuse_endless(b1, "b1")
    count = float(state.get("step", 0.0)) + 1
    m, s = (moment_of(state, key, name, theta) for key in ("exp_avg", "exp_avg_sq"))
    sign = -1.0 if group.maximize else 1.0
    coupled = 0.0 if group.decoupled else group.weight_decay
    d = sign * g + coupled * theta
    after = b1 * m + (1 - b1) * d
    s = b2 * s + (1 - b2) * d**2
    own = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)}
    entry: dict[str, Any] = {
        "step": _counted(state.get("step"), count),
        "exp_avg": after.to(own.get("exp_avg", dtype)),
        "exp_avg_sq": s.to(own.get("exp_avg_sq", dtype)),
    }
    largest = s
    if group.amsgrad:
        largest = torch.maximum(moment_of(state, "max_exp_avg_sq", name, theta), s)
        entry["max_exp_avg_sq"] = largest.to(own.get("max_exp_avg_sq", dtype))
    corrected_den = (1 - b1**count) * ((largest / (1 - b2**count)).sqrt() + group.eps)
    gain = group.lr / corrected_den
    decoupled = group.lr * group.weight_decay if group.decoupled else 0.0
    return ParameterRecursion(
        rho=b1,
        alpha=1 - b1,
        gain=gain,
        direct=0.0,
        later=_later_of_adam(b1, count),
        sign=sign,
        coupled=coupled,
        decoupled=decoupled,
        before=m,
        after=after,
        state=entry,
        change=-gain * after - decoupled * theta,
    )


def _sgd(
    name: str,
    theta: Tensor,
    g: Tensor,
    group: SGDGroup,
    state: Mapping[str, Any],
    dtype: torch.dtype,
) -> ParameterRecursion:
    del name
    rho = group.momentum
    _refuse_endless(rho, "momentum")
    buffer = state.get("momentum_buffer")
    before = torch.zeros_like(theta) if buffer is None else buffer.detach().to(theta)
    # torch's buffer begins as d itself, whatever the dampening.
    alpha = 1.0 if buffer is None or not rho else 1 - group.dampening
    sign = -1.0 if group.maximize else 1.0
    d = sign * g + group.weight_decay * theta
    after = rho * before + alpha * d
    nesterov = group.nesterov and rho
    gain, direct = (rho * group.lr, group.lr) if nesterov else (group.lr, 0.0)
    kind = dtype if buffer is None else buffer.dtype
    return ParameterRecursion(
        rho=rho,
        alpha=alpha,
        gain=torch.full_like(theta, gain),
        direct=direct,
        later=rho / (1 - rho),
        sign=sign,
        coupled=group.weight_decay,
        decoupled=0.0,
        before=before,
        after=after,
        state={"momentum_buffer": after.to(kind)} if rho else {},
        change=-gain * after - direct * d,
    )


@lru_cache(maxsize=64)
def _later_of_adam(b1: float, count: float) -> float:
    """(1 - b1^n) sum_{j>0} b1^j / (1 - b1^(n+j)): b1 / (1 - b1) late in a training, and less while
    the bias correction fades out (of b1 = 0.9: 2.0 in place of 9 at n = 1, 4.1 at n = 3)."""
    total, decayed = 0.0, b1
    while decayed > TINY_SHARE:
        total += decayed / (1 - b1**count * decayed)
        decayed *= b1
    return (1 - b1**count) * total


_RECURSIONS: dict[type, Any] = {AdamGroup: _adam, SGDGroup: _sgd}


def _counted(step: Any, count: float) -> Any:
    """The count after the step, as torch keeps it."""
    return torch.full_like(step, count) if isinstance(step, Tensor) else count


def _refuse_endless(rho: float, what: str) -> None:
    if not 0 <= rho < 1:
        raise ValueError(
            f"The optimizer has {what} = {rho}; expected at least 0 and below 1: with 1 a gradient "
            "never ceases to act, and the ledger of a run does not end."
        )
