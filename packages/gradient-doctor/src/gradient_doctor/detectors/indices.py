"""Class 18: a call that picks by an index fails, because of what was made elsewhere.

`labels = torch.zeros(n)` are floating-point numbers. As class ids they fail, often in another
function: at the line that indexes with them. The line to change is the one that made them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in, shape
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session

# the same numbers in another place: their type was chosen before
_MOVES = {
    *("view", "reshape", "squeeze", "unsqueeze", "flatten", "contiguous", "clone", "expand"),
    *("__getitem__", "unbind", "split", "chunk", "cat", "concat", "stack", "index_select", "T"),
    *("transpose", "permute", "repeat", "repeat_interleave", "detach", "data", "cpu", "cuda"),
    *("pin_memory", "select", "narrow", "masked_select", "take", "roll", "flip", "__iter__", "t"),
    *("view_as", "expand_as", "unfold", "tile", "ravel", "hstack", "vstack"),
}
_PICKS = {"__getitem__", "__setitem__"}
# where the index stands among the arguments
_PLACES = {
    **dict.fromkeys(("gather", "scatter", "scatter_", "scatter_add", "scatter_add_"), (2, "index")),
    **dict.fromkeys(("index_select", "index_add", "index_add_", "index_fill_"), (2, "index")),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_", "index_copy_"), (2, "index")),
    **dict.fromkeys(("embedding", "one_hot", "bincount"), (0, "input")),
    "take": (1, "index"),
    "take_along_dim": (1, "indices"),
}
_WHOLE = (torch.int64, torch.int32)
_LONG_ONLY = {"one_hot", "take", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_"}


class Indices(Detector):
    """Knows of each tensor without gradient the line that chose its type."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._typed = WeakIdKeyDictionary()

    def op(self, call: OpCall) -> None:
        if call.short in ("__setitem__", "__set__"):
            return
        source = next((t for t in call.inputs if t in self._typed), None)
        for output in call.outputs:
            if output.requires_grad or output in self._typed:
                continue
            kept = call.short in _MOVES or call.short == "to"
            if kept and source is not None and source.dtype == output.dtype:
                self._typed[output] = self._typed[source]
            else:
                self._typed[output] = call.site

    def op_failed(self, call: OpCall, error: BaseException) -> None:
        for index in _indices(call):
            if index.is_floating_point():
                self._say_type(call, index, error)
                return
            narrow = index.dtype != torch.int64 and _refuses(call, error)
            if call.short not in _PICKS and (index.dtype not in _WHOLE or narrow):
                self._say_type(call, index, error)
                return

    def _say_type(self, call: OpCall, index: Tensor, error: BaseException) -> None:
        made: Site | None = self._typed.get(index)
        at = f", made at {made}," if made is not None else ""
        what = "indexing" if call.short in _PICKS else call.short
        self.report(
            18,
            Severity.ERROR,
            f"{what} got {index.dtype} numbers {shape(index)} where it needs whole ones.",
            why=f"They{at} are used as indices at {call.site}: {str(error).splitlines()[0]}",
            fix="Make them with dtype=torch.long (torch.zeros and torch.ones make floats), or "
            "convert them with .long().",
            site=made or call.site,
            parameters=live_in(self.session, call.inputs),
            related=(call.site,),
        )


def _refuses(call: OpCall, error: BaseException) -> bool:
    """Whether the failed call takes 64-bit indices only, and says so."""
    text = str(error).lower()
    return call.short in _LONG_ONLY and ("int64" in text or "long" in text)


def _indices(call: OpCall) -> Iterator[Tensor]:
    """The tensors that a call picks by."""
    if call.short in _PICKS and len(call.args) > 1:
        yield from _tensors(call.args[1])
    elif call.short in _PLACES:
        index = argument(call, *_PLACES[call.short])
        if isinstance(index, Tensor):
            yield index


def _tensors(index: Any) -> Iterator[Tensor]:
    if isinstance(index, Tensor):
        yield index
    elif isinstance(index, (tuple, list)):
        for part in index:
            yield from _tensors(part)
