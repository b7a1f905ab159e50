"""Where masks were made and shaped, and where scores became infinite by one.

A row of scores whose places are all masked has no softmax. The softmax is where that is felt; the
line that masked the last place of the row, or made the mask, is the one to change.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.findings import Site
from gradient_doctor.readable import values_of
from gradient_doctor.records import OpCall

_MOVES = {
    *("view", "reshape", "unsqueeze", "squeeze", "expand", "__getitem__", "transpose", "permute"),
    *("repeat", "expand_as", "flatten", "movedim", "T", "mT", "stack", "cat", "repeat_interleave"),
}
# the same mask, or its negative, or it and another one
_SAME = {
    *("to", "bool", "float", "int", "long", "contiguous", "clone", "detach", "type_as", "type"),
    *("eq", "ne", "__eq__", "__ne__", "logical_not", "__invert__", "bitwise_not", "rsub"),
    *("__rsub__", "sub", "mul", "masked_fill", "masked_fill_", "__and__", "logical_and", "half"),
    *("__or__", "logical_or", "bitwise_and", "bitwise_or", "where", "triu", "tril"),
}


class Fill(NamedTuple):
    """Scores that a mask has set to -inf, and whether some whole row of them is."""

    site: Site | None
    whole: bool


class MaskLines:
    """What is known of the masks of this step, call by call."""

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()  # mask -> the line that first told its places apart
        self._shaped = WeakIdKeyDictionary()  # mask -> the line that gave it its shape
        self._fills = WeakIdKeyDictionary()

    def op(self, call: OpCall) -> None:
        """After a call whose first result may be a mask, or scores under one."""
        result, short = call.outputs[0], call.short
        if result.requires_grad or not call.inputs:
            return
        source = next((t for t in call.inputs if t in self._made), None)
        if source is None:
            if result.dtype is torch.bool:
                self._made[result] = self._shaped[result] = call.site
        elif short in _MOVES | _SAME or result.dtype is torch.bool:
            self._made[result] = self._made[source]
            self._shaped[result] = call.site if short in _MOVES else self._shaped[source]

    def made_at(self, mask: Tensor) -> Site | None:
        return self._made.get(mask)

    def shaped_at(self, mask: Tensor) -> Site | None:
        return self._shaped.get(mask)

    def note_infinite(self, call: OpCall, output: Tensor) -> None:
        """These scores are infinite, by this call or by one before it, and on purpose."""
        before = [self._fills[t] for t in call.inputs if t in self._fills]
        whole = next((fill for fill in before if fill.whole), None)
        if whole is not None:
            self._fills[output] = whole
            return
        fill = Fill(call.site, _has_masked_row(output))
        self._fills[output] = before[0] if before and not fill.whole else fill

    def filled_at(self, scores: Tensor) -> Site | None:
        """The line that masked the last place of some row."""
        fill = self._fills.get(scores)
        return None if fill is None else fill.site


def _has_masked_row(scores: Tensor) -> bool:
    values = values_of(scores)
    if values is None or not values.dim():
        return False
    return bool((values == -torch.inf).all(-1).any())
