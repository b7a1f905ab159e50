"""Class 19: a mask of padding that blocks rows of an attention matrix, where it should block keys.

Scores of attention have a row for each query and a column for each key. A mask of shape
[batch, 1, length, 1] is the same for all keys: rows of padding are masked as a whole, which takes
nothing from a softmax (or gives NaN, if it is with -inf), and real tokens still look at padding.

Said only of square matrices whose softmax is over the keys, of masks that differ between rows and
never between keys, and where no other mask hides keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in, shape
from gradient_doctor.findings import Severity, Site
from gradient_doctor.mask_lines import MaskLines
from gradient_doctor.readable import values_of
from gradient_doctor.session import Detector, OpCall, Session

_ENOUGH = 2  # steps
_HIDES = -1e3  # a score that is as good as none
_FILLS = {"masked_fill", "masked_fill_"}
_ATTENDS = "scaled_dot_product_attention"


@dataclass
class Blocked:
    """Scores of which whole rows are masked."""

    made: Site | None
    fill: Site | None
    mask: str
    steps: set[int] = field(default_factory=set)


class MaskedRows(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._lines = MaskLines()
        self._rows = WeakIdKeyDictionary()  # scores -> Blocked; None: some mask hides keys
        self._blocked: dict[Site | None, Blocked] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        self._lines.op(call)
        result = call.outputs[0]
        if call.short == _ATTENDS:
            mask = argument(call, 3, "attn_mask")
            if isinstance(mask, Tensor) and result.requires_grad:
                query, key = call.inputs[0], call.inputs[1]
                rows = self._of_mask(mask, (query.shape[-2], key.shape[-2]), call.site)
                self._note(rows, call)
            return
        if not result.requires_grad:
            return
        if call.short == "softmax":
            axis = argument(call, 1, "dim")
            if axis in (-1, result.dim() - 1):
                self._note(self._rows.get(call.inputs[0]), call)
            return
        mask = self._mask_of(call)
        source = next((t for t in call.inputs if t in self._rows), None)
        if mask is None:
            if source is not None and result.shape == source.shape:
                self._rows[result] = self._rows[source]
            return
        before = None if source is None else self._rows[source]
        if source is None or before is not None:
            self._rows[result] = self._of_mask(mask, tuple(result.shape[-2:]), call.site)

    def _mask_of(self, call: OpCall) -> Tensor | None:
        """The mask that this call puts on scores."""
        tensors = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, Tensor)]
        numbers = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, (int, float))]
        if call.short in _FILLS and len(tensors) > 1:
            return tensors[1] if numbers and min(numbers) <= _HIDES else None
        if call.short == "where" and tensors and tensors[0].dtype is torch.bool:
            low = [t for t in tensors[1:] if not t.requires_grad and t.numel() == 1]
            values = [values_of(t) for t in low]
            hides = any(v is not None and float(v) <= _HIDES for v in values)
            return tensors[0] if hides or (numbers and min(numbers) <= _HIDES) else None
        if call.short in ("add", "add_") and len(tensors) == 2:
            other = next((t for t in tensors if not t.requires_grad), None)
            values = None if other is None or not other.numel() else values_of(other)
            if values is not None and float(values.min()) <= _HIDES:
                return other
        return None

    def _of_mask(self, mask: Tensor, square: tuple[int, ...], site: Site | None) -> Blocked | None:
        """None if it tells keys apart, or if these are no scores of tokens for each other."""
        if len(square) != 2 or square[0] != square[1] or square[0] < 2 or mask.dim() < 2:
            return None
        values = values_of(mask)
        if values is None or mask.shape[-2] != square[0]:
            return None
        if mask.shape[-1] != 1 and bool((values != values[..., :1]).any()):
            return None
        if not bool((values != values[..., :1, :]).any()):
            return None  # all rows are alike
        return Blocked(self._lines.shaped_at(mask), site, shape(mask))

    def _note(self, rows: Blocked | None, call: OpCall) -> None:
        live = live_in(self.session, call.outputs) if rows is not None else 0
        if rows is None or not live:
            return
        kept = self._blocked.setdefault(rows.made or rows.fill, rows)
        kept.steps.add(self.session.step)
        if len(kept.steps) != _ENOUGH:
            return
        self.report(
            19,
            Severity.WARNING,
            "A mask blocks whole rows of the attention, and no keys.",
            why=f"The mask {rows.mask} is the same for all keys of a query. A row that is masked "
            "as a whole keeps its weights (with -inf they are NaN), and all other rows still "
            "attend to the places that the mask is about.",
            fix="Let the mask vary along the last axis: [batch, 1, 1, keys], "
            "unsqueeze(1).unsqueeze(2).",
            site=kept.made or kept.fill,
            parameters=live,
            related=(kept.fill, call.site),
        )
