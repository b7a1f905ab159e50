"""Gradients that cancel: what arrives is large, and nothing but rounding is left of it.

The probabilities of a softmax sum to 1, normalised values have the mean 0: a loss that is made of
these sums is a constant, whatever the weights are. Its gradient is not exactly zero. It is what
rounding has left, a ten-millionth of its parts, and its direction is an accident (which Adam makes
as long as any other).

Two places show it: a node of softmax or of a normalisation, whose rule subtracts such a sum; and a
value that is used several times, where the gradients of its uses add up to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradient_doctor.detectors.common import argument
from gradient_doctor.graph import MARK, NodeOrigin, node_of
from gradient_doctor.readable import values_of
from gradient_doctor.records import OpCall

_ROUNDING = 100.0  # times the precision of the numbers
_NORMS = ("NativeLayerNorm", "NativeBatchNorm", "NativeGroupNorm")
_PRECISE = (torch.float32, torch.float64)
_SOFTMAX = {"softmax"}
_NORMALISING = {"layer_norm", "batch_norm", "group_norm", "instance_norm"}
_INSIDE = 4  # nodes of one call
_AXIS, _SCALE = MARK + ".axis", MARK + ".scale"


@dataclass(eq=False)
class Cancelled:
    """A node that gets, or passes on, rounding instead of a gradient."""

    node: Any
    kind: str  # "softmax", "norm" or "uses"
    origin: NodeOrigin | None
    use: NodeOrigin | None  # the last call that used its value
    before: float  # the size of the gradients that cancel
    after: float


class Cancellations:
    """What is seen of one backward, node by node."""

    def __init__(self) -> None:
        self.seen: list[Cancelled] = []
        self._uses: dict[Any, list[tuple[int, NodeOrigin | None]]] = {}
        self._sizes: dict[tuple[Any, int], list[float]] = {}  # of what comes to each value

    def expect(self, nodes: Iterable[tuple[Any, NodeOrigin | None]]) -> None:
        """Before the backward: who uses the value of each node?"""
        for node, origin in nodes:
            for child, place in node.next_functions:
                if child is not None:
                    number = node._sequence_nr()
                    self._uses.setdefault(child, []).append((number, origin))
                    self._sizes.setdefault((child, place), [])

    def look(
        self, node: Any, origin: NodeOrigin | None, came: dict[int, Tensor], went: dict[int, Tensor]
    ) -> None:
        for place, (child, at) in enumerate(node.next_functions):
            if place in went and len(self._uses.get(child, ())) > 1:
                self._sizes[child, at].append(_greatest(went[place]))
        first = next(iter(came.values()))
        if first.dtype not in _PRECISE:
            return
        limit = _ROUNDING * torch.finfo(first.dtype).eps
        name = node.name()
        if name.startswith("SoftmaxBackward"):
            expected, kind = _of_softmax(node, first), "softmax"
        elif name.startswith(_NORMS):
            expected, kind = _greatest(first) * node.metadata.get(_SCALE, 0.0), "norm"
        else:
            expected, kind = 0.0, "uses"
        if expected > 0.0 and 0 in went:
            self._note(node, origin, kind, expected, _greatest(went[0]), limit)
        for at, gradient in came.items():
            sizes = self._sizes.get((node, at), [])
            if len(sizes) > 1:
                self._note(node, origin, "uses", max(sizes), _greatest(gradient), limit)

    def _note(
        self,
        node: Any,
        origin: NodeOrigin | None,
        kind: str,
        before: float,
        after: float,
        limit: float,
    ) -> None:
        if before > 0.0 and after <= limit * before:
            uses = sorted(self._uses.get(node, ()), key=lambda use: use[0])
            use = uses[-1][1] if uses else None
            self.seen.append(Cancelled(node, kind, origin, use, before, after))


def mark_normalised(call: OpCall) -> None:
    """Write on the node of a softmax its axis, and on that of a normalisation its scale.

    Autograd keeps both; to ask it would call the program's own hooks for saved tensors.
    """
    short = call.short
    if short not in _SOFTMAX | _NORMALISING or not call.outputs or not call.inputs:
        return
    node, source, result = node_of(call.outputs[0]), call.inputs[0], call.outputs[0]
    if short in _SOFTMAX:
        axis = argument(call, 1, "dim")
        if node is not None and type(axis) is int and source.dim():
            node.metadata[_AXIS] = axis % source.dim()
        return
    for _ in range(_INSIDE):  # instance_norm is a batch_norm between two views
        if node is None or node.name().startswith(_NORMS):
            break
        node = node.next_functions[0][0] if node.next_functions else None
    before, after = values_of(source), values_of(result)
    if node is not None and before is not None and after is not None and before.numel() > 1:
        spread = float(before.float().std())
        node.metadata[_SCALE] = float(after.float().std()) / spread if spread > 0.0 else 0.0


def _of_softmax(node: Any, gradient: Tensor) -> float:
    """The size of a gradient that is the same for all places, of which a softmax passes nothing."""
    axis = node.metadata.get(_AXIS)
    if axis is None or axis >= gradient.dim() or gradient.shape[axis] < 2:
        return 0.0
    size = _greatest(gradient)
    spread = float((gradient.amax(axis) - gradient.amin(axis)).max())
    return size if spread <= _ROUNDING * torch.finfo(gradient.dtype).eps * size else 0.0


def _greatest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
