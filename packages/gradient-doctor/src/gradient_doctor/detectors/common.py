"""Small questions that several detectors ask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from gradient_doctor.findings import Site
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, OpCall, Session


def live_in(session: Session, tensors: Iterable[Any]) -> int:
    """The parameters that a gradient can reach through any of these."""
    mask = 0
    for tensor in tensors:
        taint = session.taint_of(tensor) if isinstance(tensor, Tensor) else None
        mask |= 0 if taint is None else taint.live
    return mask


def maximised(session: Session, backward: Backward) -> bool:
    """Whether an optimizer of what this backward reaches climbs instead of descending."""
    live = backward.taint.live if backward.taint is not None else 0
    return any(
        group.get("maximize")
        for optimizer in session.registry.optimizers.values()
        if session.registry.bits(owned_by(optimizer)) & live
        for group in optimizer.param_groups
    )


def loss_line(session: Session, call: OpCall) -> Site | None:
    """Where a loss is reduced: of its module the line with the options, else that of the call."""
    stack = session.module_stack
    if stack and isinstance(stack[-1], nn.modules.loss._Loss):
        return session.registry.construction(stack[-1]) or call.site
    return call.site


def argument(call: OpCall, position: int, name: str, default: Any = None) -> Any:
    if position < len(call.args):
        return call.args[position]
    return call.kwargs.get(name, default)


def shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
