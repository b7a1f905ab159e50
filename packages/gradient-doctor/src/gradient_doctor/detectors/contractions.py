"""Class 33: attention weights that sum to 1 over another axis than the one that is summed away.

`softmax(q @ k.transpose(-2, -1), dim=2) @ v`: the product runs over the keys, and it is the queries
that compete. Each output is a sum with weights of any size. It is the axis number of three axes,
kept when heads were added, or that of another layout.

Said of scores that are products of two activations (an assignment to learnt clusters sums to 1 over
the clusters, and is summed over the members), that meet the values as the softmax left them: slot
attention divides by a second sum in between, and a transposed matrix is read the other way on
purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in, shape
from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session

_ENOUGH = 2  # steps
_MATRIX = {"matmul", "bmm", "__matmul__", "einsum"}
_SAME = {
    *("float", "half", "to", "type_as", "contiguous", "clone", "clamp", "nan_to_num", "dropout"),
    *("masked_fill", "masked_fill_", "dropout_"),
}
_SCALED = {"mul", "div", "mul_", "div_", "true_divide", "multiply", "divide"}
_RESHAPES = {"view", "reshape", "flatten", "unflatten"}
_HIDDEN = -1e3  # what a mask adds


@dataclass(frozen=True)
class Weights:
    """What a softmax has made of scores, and the axis over which it sums to 1, from the end."""

    axis: int  # -1 is the last
    site: Site
    what: str


class Contractions(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._scores = WeakIdKeyDictionary()  # products of two activations
        self._weights = WeakIdKeyDictionary()
        self._learnt = WeakIdKeyDictionary()  # made of parameters alone: clusters, not activations
        self._steps: dict[Site, set[int]] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        short, source, result = call.short, call.inputs[0], call.outputs[0]
        if all(self._is_learnt(t) for t in call.inputs):
            self._learnt[result] = True
            return
        if short in _MATRIX:
            if self._weights:
                self._contract(call)
            both = [t for t in call.inputs if t.requires_grad and not self._is_learnt(t)]
            if len(both) == len(call.inputs) == 2 and result.dim() > 2:
                self._scores[result] = True
        elif short == "softmax":
            if source in self._scores and result.requires_grad:
                self._softmax(call)
        elif source in self._weights:
            self._follow(call, self._weights[source])
        elif source in self._scores and short in _RESHAPES and result.dim() > 2:
            self._scores[result] = True
        elif source in self._scores and result.shape == source.shape:
            masked = short in ("add", "add_", "__iadd__", "sub") and self._is_bias(call)
            if short in _SAME | _SCALED or masked or (short == "where" and len(call.inputs) > 1):
                self._scores[result] = True
        elif short == "where" and any(t in self._scores for t in call.inputs[1:]):
            self._scores[result] = True

    def _is_learnt(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or tensor in self._learnt

    def _is_bias(self, call: OpCall) -> bool:
        """A mask, or positions that all samples share; scores that grow by rounds are no such."""
        if len(call.inputs) == 1:
            return True
        other = call.inputs[1]
        if other.numel() < call.inputs[0].numel():
            return True
        values = None if other.requires_grad else self.session.values(other)
        return values is not None and bool((values < _HIDDEN).any())

    def _softmax(self, call: OpCall) -> None:
        source, result = call.inputs[0], call.outputs[0]
        axis = argument(call, 1, "dim")
        if axis is None:  # as torch chooses it
            axis = 0 if source.dim() in (0, 1, 3) else 1
        if type(axis) is not int or source.shape[axis] < 2:
            return
        stack = self.session.module_stack
        own = stack and type(stack[-1]).__module__.startswith("torch.nn")
        site = (birth_site(self.session.registry, stack[-1]) if own else None) or call.site
        if site is not None:
            place = axis % source.dim()
            what = f"softmax of {shape(source)} is over axis {place}"
            self._weights[result] = Weights(place - source.dim(), site, what)

    def _follow(self, call: OpCall, made: Weights) -> None:
        source, result = call.inputs[0], call.outputs[0]
        if call.short in _SAME and result.shape == source.shape:
            self._weights[result] = made
        elif call.short in _RESHAPES and result.shape[-2:] == source.shape[-2:]:
            # heads and samples become one axis, or come apart again
            self._weights[result] = replace(made, axis=max(made.axis, -3))

    def _contract(self, call: OpCall) -> None:
        for place, operand in enumerate(call.inputs[:2]):
            made: Weights | None = self._weights.get(operand)
            if made is None or operand.dim() < 3:
                continue
            if call.short == "einsum":
                summed = _summed(call.args[0], place, operand.dim())
            else:
                summed = {-1} if place == 0 else {-2}
            if summed and made.axis not in summed and all(operand.shape[k] > 1 for k in summed):
                self._say(call, made, min(summed) % operand.dim())

    def _say(self, call: OpCall, made: Weights, summed: int) -> None:
        steps = self._steps.setdefault(made.site, set())
        steps.add(self.session.step)
        if len(steps) != _ENOUGH:
            return
        self.report(
            33,
            Severity.WARNING,
            f"{made.what}, but {call.short} sums over axis {summed} of the weights.",
            why=f"What is weighed at {call.site} stands along axis {summed}; its weights do not "
            "sum to 1. Others that are not weighed against each other (queries, heads, samples) "
            "compete instead.",
            fix="Take the softmax over the axis that the product sums over: dim=-1 of "
            "[..., queries, keys].",
            site=made.site,
            parameters=live_in(self.session, call.inputs),
            related=(call.site,),
        )


def _summed(equation: Any, place: int, rank: int) -> set[int]:
    """Axes of one operand that an einsum sums over, counted from the end; none if unclear."""
    if not isinstance(equation, str) or "->" not in equation:
        return set()
    left, right = equation.replace(" ", "").split("->")
    parts = left.split(",")
    if place >= len(parts):
        return set()
    labels = parts[place]
    if "..." in labels:
        head, tail = labels.split("...")
        labels = head + "." * (rank - len(head) - len(tail)) + tail
    if len(labels) != rank:
        return set()
    return {k - rank for k, label in enumerate(labels) if label != "." and label not in right}
