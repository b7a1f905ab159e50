"""Small questions that several detectors ask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gradient_doctor.session import OpCall, Session


def live_in(session: Session, tensors: Iterable[Any]) -> int:
    """The parameters that a gradient can reach through any of these."""
    mask = 0
    for tensor in tensors:
        taint = session.taint_of(tensor) if isinstance(tensor, Tensor) else None
        mask |= 0 if taint is None else taint.live
    return mask


def argument(call: OpCall, position: int, name: str, default: Any = None) -> Any:
    if position < len(call.args):
        return call.args[position]
    return call.kwargs.get(name, default)


def shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
