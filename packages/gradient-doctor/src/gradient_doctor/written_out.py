"""Sigmoid and softmax that are written out: 1 / (1 + exp(-x)), exp(x) / exp(x).sum().

Also the exponential of a log_softmax or logsigmoid, and (1 + tanh(x)) / 2.

Only the calls count, whatever the names. What an exponential has become is kept with the tensor:
itself, its sum (over an axis, or with 1), and numbers of the same values in another shape.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.records import OpCall

_DIVISIONS = {"div", "true_divide", "divide", "__rdiv__", "__rtruediv__", "__truediv__"}
_ADDITIONS = {"add", "__radd__", "__add__"}
_SAME = {"unsqueeze", "view", "reshape", "squeeze", "expand", "expand_as", "clone", "__getitem__"}
_STARTS = {"tanh": "tanh", "log_softmax": "log p", "logsigmoid": "log s"}
_ONE_MORE = {"exp": "one more", "tanh": "doubled"}
_SUMS = {"sum", "nansum"}


@dataclass(frozen=True)
class Part:
    """What has become of an exponential ("exp"): the "sum" of all, or "one more" than each.

    Of a tanh likewise: "tanh" and "doubled", which lies between 0 and 2.
    """

    kind: str
    of: int  # the number of that exponential


class WrittenOut:
    def __init__(self) -> None:
        self._parts = WeakIdKeyDictionary()
        self._count = itertools.count()

    def op(self, call: OpCall) -> str | None:
        """The name of the activation that this call completes."""
        if not call.outputs or not call.inputs:
            return None
        result, known = call.outputs[0], self._parts.get(call.inputs[0])
        if call.short in ("exp", "exp_"):
            self._parts[result] = Part("exp", next(self._count))
            return (
                None if known is None else {"log p": "softmax", "log s": "sigmoid"}.get(known.kind)
            )
        if call.short in _STARTS:
            self._parts[result] = Part(_STARTS[call.short], next(self._count))
        elif known is None and len(call.inputs) < 2:
            return None
        elif call.short in _SUMS and known is not None and known.kind == "exp":
            self._parts[result] = Part("sum", known.of)
        elif call.short in _SAME and known is not None:
            self._parts[result] = known
        elif call.short in _ADDITIONS and _has_one(call):
            parts = [self._parts[t] for t in call.inputs if t in self._parts]
            if len(parts) == 1 and parts[0].kind in _ONE_MORE:
                self._parts[result] = Part(_ONE_MORE[parts[0].kind], parts[0].of)
        elif call.short == "reciprocal" and known is not None:
            return "sigmoid" if known.kind == "one more" else None
        elif known is not None and known.kind == "doubled":
            half = (call.short == "mul" and 0.5) or (call.short in _DIVISIONS and 2.0)
            return (
                "sigmoid"
                if half and any(type(a) in (int, float) and a == half for a in call.args)
                else None
            )
        elif call.short in _DIVISIONS:
            return self._divided(call)
        elif call.short == "pow" and known is not None and known.kind == "one more":
            return "sigmoid" if _number(call, 1) == -1 else None
        return None

    def _divided(self, call: OpCall) -> str | None:
        tensors = [t for t in call.args[:2] if isinstance(t, Tensor)]
        if len(tensors) == 1:
            part = self._parts.get(tensors[0])
            over_it = call.short.startswith("__r") or not isinstance(call.args[0], Tensor)
            one = _number(call, 1 if call.short.startswith("__r") else 0) == 1
            complete = part is not None and part.kind == "one more" and over_it and one
            return "sigmoid" if complete else None
        if len(tensors) != 2:
            return None
        above, below = (self._parts.get(t) for t in tensors)
        if above is None or below is None or above.kind != "exp" or above.of != below.of:
            return None
        return {"sum": "softmax", "one more": "sigmoid"}.get(below.kind)


def _number(call: OpCall, position: int) -> Any:
    value = call.args[position] if position < len(call.args) else None
    return value if isinstance(value, (int, float)) else None


def _has_one(call: OpCall) -> bool:
    """Whether 1 is added, as a number or as a tensor of one value."""
    for value in call.args[:2]:
        if isinstance(value, Tensor):
            if (
                value.numel() == 1
                and not value.requires_grad
                and torch.equal(
                    value.detach().reshape(()).double(), torch.ones((), dtype=torch.float64)
                )
            ):
                return True
        elif value == 1:
            return True
    return False
