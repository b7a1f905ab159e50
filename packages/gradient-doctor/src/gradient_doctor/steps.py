"""What an optimizer step did to each parameter: a sample of elements before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradient_doctor.readable import as_real

_SAMPLE = 8192
# the numbers of a tensor, or None where they cannot be read: `Session.values`
Read = Callable[[Tensor], Tensor | None]


@dataclass
class Sampled:
    parameter: Tensor
    values: Tensor
    gradient_norm: float
    nonzero_gradient: Tensor


@dataclass
class Before:
    """Taken just before `optimizer.step()`."""

    optimizer: Any
    rates: list[float]
    sampled: list[Sampled] = field(default_factory=list)
    without_gradient: list[Tensor] = field(default_factory=list)


@dataclass
class Update:
    """One parameter's step: the share of elements that moved among those with a gradient."""

    parameter: Tensor
    gradient_norm: float
    changed: float  # of the sampled elements with non-zero gradient; nan without such
    moved_norm: float
    value_norm: float
    dtype: torch.dtype


@dataclass
class StepFacts:
    optimizer: Any
    rates: list[float]
    updates: list[Update]
    without_gradient: list[Tensor]


def norm_of(tensor: Tensor) -> float:
    """The Euclidean norm; half precision is summed in fp32, as its squares overflow."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32 if half else None))


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // _SAMPLE)
    return flat[::stride].clone()


def _rate(group: dict[str, Any]) -> float:
    """The learning rate; some optimizers have none, or find their own (None)."""
    rate = group.get("lr")
    return float("nan") if rate is None else float(rate)


@torch.no_grad()
def before(optimizer: Any, read: Read) -> Before:
    taken = Before(optimizer, [_rate(group) for group in optimizer.param_groups])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                taken.without_gradient.append(parameter)
                continue
            stored, values = read(gradient), read(parameter)
            if stored is None or values is None:
                continue
            dense = stored if stored.shape == gradient.shape else gradient.detach().to_dense()
            taken.sampled.append(
                Sampled(parameter, _sample(values), norm_of(stored), _sample(dense) != 0)
            )
    return taken


@torch.no_grad()
def after(taken: Before, read: Read) -> StepFacts:
    updates = []
    for sampled in taken.sampled:
        values = read(sampled.parameter)
        if values is None:
            continue
        now = _sample(values)
        if now.shape != sampled.values.shape:
            continue  # resized by its own step: no element of before is one of after
        differs = now != sampled.values
        relevant = sampled.nonzero_gradient
        count = int(relevant.sum())
        changed = float((differs & relevant).sum()) / count if count else float("nan")
        updates.append(
            Update(
                sampled.parameter,
                sampled.gradient_norm,
                changed,
                float(as_real(now - sampled.values).float().norm()),
                float(as_real(sampled.values).float().norm()),
                sampled.parameter.dtype,
            )
        )
    return StepFacts(taken.optimizer, taken.rates, updates, taken.without_gradient)
