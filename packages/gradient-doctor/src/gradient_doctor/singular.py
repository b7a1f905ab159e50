"""Operations of the traced steps whose inputs a later batch may bring to a singular point.

A loss often turns NaN in a step that nobody traced: a silent recording, an empty mask, two equal
points. That step is over when it is seen, but its code has run before: what took a root, a
logarithm or a quotient without a guard then is what failed now. A guard is what keeps a value off
the point: a constant that is added, a clamp, an exponential.

Whether the value failed or only its slope is known from the weights: after a bad slope they are
no numbers either.

An exponential has no singular point, but it overflows: its guard is whatever keeps its input from
growing (a minus before what is never negative, a clamp from above, the maximum subtracted first).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.bounds import Bounds, is_number
from gradient_doctor.findings import Site
from gradient_doctor.readable import values_of
from gradient_doctor.records import OpCall
from gradient_doctor.sites import called_by_torch

# their slope is infinite where their value is a number
_SLOPES = {"sqrt", "pow", "acos", "arccos", "asin", "arcsin"}
# their value is no number
_VALUES = {"div", "log", "log2", "log10", "rsqrt", "reciprocal", "pow", "std", "var", "mean"}
_ENDS = {"acos", "arccos", "asin", "arcsin"}  # singular at 1 and -1
_DIVISIONS = {"div", "true_divide", "divide", "__truediv__", "__rtruediv__"}
_POSITIVE = {"exp", "softplus", "cosh", "expm1", "full", "ones", "sinc"}
_ADDITIONS = {"add", "__radd__", "add_", "__iadd__"}
_BOUNDS = {"clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "maximum", "max", "clip_"}
# a value off the point stays off it
_KEEPS = {
    *("view", "reshape", "squeeze", "unsqueeze", "flatten", "transpose", "permute", "expand"),
    *("sqrt", "sum", "mean", "contiguous", "__getitem__", "float", "double", "to", "clone", "T"),
    *("expand_as", "detach", "pow", "square", "log1p", "exp"),
}

_OVERFLOWS = {"exp", "exp_", "expm1", "exp2", "cosh", "sinh"}
_COMBINES = {"mul", "div", "add", "cat", "stack", "maximum"}  # of two values off it


@dataclass(frozen=True)
class Exposed:
    """An operation whose input nothing keeps off its singular point."""

    op: str
    site: Site
    nearest: float  # of its inputs in the traced steps, as a part of their typical size


class Singular:
    def __init__(self) -> None:
        self._guarded = WeakIdKeyDictionary()
        self._chosen = WeakIdKeyDictionary()  # what a mask has taken out: there may be nothing
        self._exposed: dict[tuple[str, Site], Exposed] = {}
        self._bounds = Bounds()
        self._counts: dict[Site, set[float]] = {}  # numbers that a line has divided by
        self._growing: dict[Site, Exposed] = {}  # exponentials of what nothing bounds from above

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        self._follow(call)
        self._bounds.follow(call)
        if call.short in _OVERFLOWS:
            self._exponential(call)
        short, value = _operand(call)
        if value is None and short == "div" and call.outputs[0].requires_grad:
            self._count(call)
        if value is None or call.site is None or not call.outputs[0].is_floating_point():
            return
        if short in ("mean", "std", "var"):
            if short == "mean" and value not in self._chosen:
                return
            distance = float(max(value.numel(), 1))
        elif value in self._guarded or (short == "reciprocal" and called_by_torch()):
            return  # a gradient scaler's own reciprocal is not the program's
        else:
            distance = _distance(short, value)
        earlier = self._exposed.get((short, call.site))
        if earlier is None or distance < earlier.nearest:
            self._exposed[short, call.site] = Exposed(short, call.site, distance)

    def _count(self, call: OpCall) -> None:
        """A division by a plain number that differs between steps: a count, one day of nothing."""
        number = call.args[1] if len(call.args) > 1 else None
        if not isinstance(number, (int, float)) or call.site is None or number <= 0:
            return
        seen = self._counts.setdefault(call.site, set())
        seen.add(float(number))
        if len(seen) > 1:
            self._exposed["div", call.site] = Exposed("div", call.site, min(seen) / max(seen))

    def _follow(self, call: OpCall) -> None:
        result, short = call.outputs[0], call.short
        source = call.inputs[0]
        mask = call.args[1] if len(call.args) > 1 else None
        by_mask = isinstance(mask, Tensor) and not mask.is_floating_point()
        chosen = short == "masked_select" or (short == "__getitem__" and by_mask)
        if chosen or (source in self._chosen and short not in ("sum", "mean")):
            self._chosen[result] = True
        guarded = short in _POSITIVE or (short in _ADDITIONS | _BOUNDS and _has_bound(call))
        guarded |= short in _KEEPS and source in self._guarded
        if not guarded and short in _COMBINES:
            guarded = all(t in self._guarded or is_number(t) for t in call.inputs)
        if guarded:
            self._guarded[result] = True

    def _exponential(self, call: OpCall) -> None:
        value = call.inputs[0]
        if call.site is None or not value.requires_grad or self._bounds.above(value):
            return
        values = values_of(value)
        if values is None or not values.numel() or values.is_complex():
            return
        distance = -float(values.max())
        earlier = self._growing.get(call.site)
        if earlier is None or distance < earlier.nearest:
            short = call.short.rstrip("_")
            self._growing[call.site] = Exposed(short, call.site, distance)

    def suspects(self, slope: bool) -> list[Exposed]:
        """What may have failed, the likeliest first."""
        kinds = _SLOPES if slope else _VALUES
        known = [e for e in self._exposed.values() if e.op in kinds]
        return sorted(known, key=lambda e: e.nearest) + self.exponentials()

    def selections(self) -> list[Exposed]:
        """Means of what a mask has chosen: of nothing, they are no numbers, but have a slope."""
        means = [e for e in self._exposed.values() if e.op == "mean"]
        return sorted(means, key=lambda e: e.nearest)

    def exponentials(self) -> list[Exposed]:
        """What may have overflowed, that with the largest input first."""
        return sorted(self._growing.values(), key=lambda e: e.nearest)


def _operand(call: OpCall) -> tuple[str, Tensor | None]:
    """The operation, and the value that it must not get at a certain point."""
    short = call.short.rstrip("_") if not call.short.endswith("__") else call.short
    if short in _DIVISIONS:
        place = 0 if short == "__rtruediv__" else 1
        value = call.args[place] if len(call.args) > place else None
        short = "div"
    else:
        value = call.inputs[0]
    if short in ("pow", "__pow__"):
        power = call.args[1] if len(call.args) > 1 else call.kwargs.get("exponent")
        if not isinstance(power, (int, float)) or power >= 1 or power == 0:
            return short, None
        short = "pow"
    if short not in _SLOPES | _VALUES or not isinstance(value, Tensor):
        return short, None
    counted = short == "div" and value.dtype != torch.bool  # a count of what a mask has left
    needed = value.is_floating_point() and (value.requires_grad or short not in _SLOPES)
    needed |= counted and not value.is_complex()
    return short, value if needed else None


def _distance(short: str, value: Tensor) -> float:
    values = values_of(value)
    if values is None or not values.numel():
        return math.inf
    sizes = values.abs().float()
    if short in _ENDS:
        return float((1 - sizes).abs().min())
    typical = float(sizes.mean())
    return float(sizes.min()) / typical if typical > 0 else 0.0


def _has_bound(call: OpCall) -> bool:
    """A number above 0 that is added, or that a clamp does not go below."""
    numbers: list[Any] = [*call.args, *call.kwargs.values()]
    return any(
        value > 0
        for value in numbers
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ) or any(isinstance(v, Tensor) and is_number(v) and bool((v > 0).all()) for v in numbers[1:])
