"""Class 19: which places of a batch does a masked loss keep?

Seen from the gradient of the prediction, not from the mask: a place counts if its gradient is not
zero, however it was left out (a product, masked_fill, an index, ignore_index, in place). Where the
places that count are the ends of rows, and all their targets are one number, while those that are
left out have many, the mask is inverted: padding is learnt, and nothing else.

A mask `arange(n) < lengths` that lets everything through, because n is not the axis that the
lengths count, hides nothing either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in, shape
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import MARK, node_of
from gradient_doctor.session import Detector, OpCall, Session

_ENOUGH = 2  # steps
_DISTINCT = 4  # targets that are left out
_PLACES = 8  # of either kind
_IDS = {"cross_entropy", "nll_loss"}
_ERRORS = {
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    "binary_cross_entropy_with_logits",
}
_SUB = {"sub", "__rsub__"}
_COMPARES = {"lt", "gt", "le", "ge", "__lt__", "__gt__", "__le__", "__ge__"}
_RANGES = {"arange", "range"}
_KEEPS = {
    *("__getitem__", "view", "reshape", "unsqueeze", "squeeze", "expand", "contiguous", "clone"),
    *("expand_as", "transpose", "repeat", "float", "long", "to", "int", "bool", "type_as"),
}
_MASKS = {"mul", "multiply", "expand_as", "masked_fill", "where", "masked_select", "expand", "mul_"}
_WRITES = {"masked_fill_", "__setitem__", "mul_"}


@dataclass(frozen=True)
class Open:
    """A mask of lengths that hides nothing: its own length, the longest, and where it was made."""

    length: int
    longest: int
    site: Site | None


class InvertedMasks(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._ranges = WeakIdKeyDictionary()
        self._open = WeakIdKeyDictionary()  # masks -> Open
        self._masked: Site | None = None  # of this step: the last use of a mask on live values
        self._masks = WeakIdKeyDictionary()  # boolean tensors, and casts of them -> their line
        self._steps: dict[tuple[str, Site | None], set[int]] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            if call.outputs and call.short in _RANGES:
                self._ranges[call.outputs[0]] = True
            return
        short, source, result = call.short, call.inputs[0], call.outputs[0]
        if short in _RANGES:
            self._ranges[result] = True
        elif short in _COMPARES and result.dim() > 1:
            self._compare(call)
        elif short in _KEEPS and source in self._ranges:
            self._ranges[result] = True
        self._follow_masks(call)
        if self._open:
            self._follow_open(call)
        if short in _IDS | _ERRORS:
            self._loss(call)
        elif short in _SUB and len(call.inputs) == 2 and call.inputs[0].dim() > 1:
            self._difference(call)

    def step_ended(self, record: object) -> None:
        self._masked = None

    def _follow_masks(self, call: OpCall) -> None:
        result = call.outputs[0]
        mask = next((t for t in call.inputs if t in self._masks), None)
        if result.dtype is torch.bool:
            self._masks[result] = call.site
        elif mask is not None and mask is call.inputs[0] and call.short in _KEEPS:
            self._masks[result] = self._masks[mask]
        elif mask is not None and result.requires_grad and call.short in _MASKS | _WRITES:
            self._masked = self._masks[mask] or call.site

    # what counts

    def _loss(self, call: OpCall) -> None:
        prediction, target = argument(call, 0, "input"), argument(call, 1, "target")
        if not (isinstance(prediction, Tensor) and isinstance(target, Tensor)):
            return
        ids = call.short in _IDS and not target.is_floating_point()
        if ids and target.shape != prediction.shape[:1] + prediction.shape[2:]:
            return
        if not ids and target.shape != prediction.shape:
            return
        self._watch(prediction, target, 1 if ids else None, call)

    def _difference(self, call: OpCall) -> None:
        left, right = call.inputs
        prediction, target = (left, right) if left.requires_grad else (right, left)
        if target.requires_grad or not prediction.requires_grad or left.shape != right.shape:
            return
        taint = self.session.taint_of(target)
        if taint is None or not taint.depends:
            self._watch(prediction, target, None, call)

    def _watch(self, prediction: Tensor, target: Tensor, classes: int | None, call: OpCall) -> None:
        node = node_of(prediction)
        values = None if target.requires_grad else self.session.values(target)
        if node is None or values is None or target.dim() < 2 or target.numel() < 2 * _PLACES:
            return
        metadata = cast(dict[str, Any], node.metadata)
        if MARK + ".kept" in metadata:
            return
        live = live_in(self.session, [prediction])
        metadata[MARK + ".kept"] = self._observer(values.detach().clone(), classes, live, call.site)

    def _observer(
        self, target: Tensor, classes: int | None, live: int, loss: Site | None
    ) -> Callable[[Tensor], None]:
        def observe(gradient: Tensor) -> None:
            counts = gradient != 0
            if classes is not None and counts.dim() > 1:
                counts = counts.any(classes)
            if counts.shape == target.shape and _inverted(counts, target):
                self._say_inverted(counts, target, live, loss)

        return observe

    def _say_inverted(self, counts: Tensor, target: Tensor, live: int, loss: Site | None) -> None:
        site = self._masked or loss
        if not self._again("inverted", site):
            return
        number = int(counts.sum())
        self.report(
            19,
            Severity.WARNING,
            f"The loss counts at {number} of {counts.numel()} places, and they are the padding.",
            why="Only the ends of rows have a gradient. All their targets are "
            f"{float(target[counts][0]):g}, while those of the places that are left out differ: "
            "the mask is inverted.",
            fix="Negate the mask: keep what lies before the length of a row.",
            site=site,
            parameters=live,
            related=(loss,),
        )

    # masks of lengths that hide nothing

    def _compare(self, call: OpCall) -> None:
        if len(call.inputs) != 2 or not any(t in self._ranges for t in call.inputs):
            return
        lengths = next((t for t in call.inputs if t not in self._ranges), None)
        result = call.outputs[0]
        if lengths is None or lengths.is_floating_point() or lengths.numel() < 2:
            return
        n, longest = result.shape[-1], int(lengths.max())
        if n < longest and n > 1 and int(lengths.min()) < longest and bool(result.all()):
            self._open[result] = Open(n, longest, call.site)

    def _follow_open(self, call: OpCall) -> None:
        mask = next((t for t in call.inputs if t in self._open), None)
        if mask is None:
            return
        known: Open = self._open[mask]
        result = call.outputs[0]
        if call.short in _MASKS and known.longest in result.shape:
            if self._again("open", call.site):
                self._say_open(known, call, result)
        elif call.short in _KEEPS and mask is call.inputs[0]:
            self._open[result] = known

    def _say_open(self, known: Open, call: OpCall, result: Tensor) -> None:
        self.report(
            19,
            Severity.WARNING,
            "A mask of lengths hides nothing: it runs along another axis than the lengths.",
            why=f"It has {known.length} places, and the lengths go up to {known.longest}: all of "
            f"it is True. The values that it is put on are {shape(result)}, where the axis of "
            f"{known.longest} is the one that the lengths count: padding counts in full.",
            fix="Make the mask as long as that axis, and unsqueeze it to lie along it.",
            site=call.site,
            related=(known.site,),
        )

    def _again(self, kind: str, site: Site | None) -> bool:
        steps = self._steps.setdefault((kind, site), set())
        steps.add(self.session.step)
        return len(steps) == _ENOUGH


def _inverted(counts: Tensor, target: Tensor) -> bool:
    """Whether what counts are the ends of rows, all with one target, and the rest has many."""
    number = int(counts.sum())
    if number < _PLACES or counts.numel() - number < _PLACES:
        return False
    kept, left = target[counts], target[~counts]
    if bool((kept != kept[0]).any()) or bool((left == kept[0]).all()):
        return False
    if len(left.unique()) < _DISTINCT or 10 * int((left == kept[0]).sum()) > 5 * left.numel():
        return False
    rows = counts.long()
    if rows.dim() > 2:  # features of a place count together
        rows = rows.flatten(2).amax(2)
    ends = rows[:, 1:] >= rows[:, :-1]
    lengths = rows.sum(1)
    return bool(ends.all()) and bool((lengths != lengths[0]).any())
