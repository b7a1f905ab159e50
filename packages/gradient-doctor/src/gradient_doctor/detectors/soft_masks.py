"""Class 19: a mask before a softmax that hides nothing.

exp(0) is 1. Scores that were multiplied by 0, filled with 1e-9 or with 0, or had 0 and 1 added to
them, keep their share of the softmax; only scores far below the others lose it. Judged by effect:
the weights of what was masked, beside those of what was not. Where the weights are masked once more
after the softmax, they are set right there, and nothing is said.

scaled_dot_product_attention and nn.MultiheadAttention add a mask of floats to the scores: 0 and 1
of floats hide nothing either.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session, StepRecord
from gradient_doctor.slips import surroundings

_ENOUGH = 2  # steps
_SHARE = 0.05  # of the weight of what is not masked
_FILLS = {"masked_fill", "masked_fill_"}
_PRODUCT = {"mul", "multiply", "mul_"}
_SUM = {"add", "add_", "__radd__"}
_KEEPS = {"float", "to", "contiguous", "clone", "div", "type_as", "half"}
_MOVES = _KEEPS | {"view", "reshape", "unsqueeze", "squeeze", "transpose", "dropout", "permute"}
_SOFTMAX = {"softmax", "log_softmax"}
_MAKES = {
    *("tril", "triu", "float", "to", "type_as", "eq", "ne", "lt", "gt", "le", "ge", "tril_"),
    *("unsqueeze", "view", "expand", "__getitem__", "repeat", "ones", "zeros", "triu_", "int"),
    *("bool", "__eq__", "__ne__", "stack", "logical_not", "bitwise_not", "__invert__", "long"),
}


@dataclass(eq=False)
class Masked:
    """Scores at some places of which a mask has written, or weights made of them."""

    places: Tensor  # True is masked
    how: str
    site: Site | None
    share: float = 0.0
    live: int = 0


class SoftMasks(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._masked = WeakIdKeyDictionary()  # scores -> Masked
        self._made = WeakIdKeyDictionary()  # masks -> the line
        self._weights = WeakIdKeyDictionary()  # of a softmax -> Masked
        self._open: list[Masked] = []  # of this step: masks that have hidden nothing so far
        self._steps: dict[Site | None, set[int]] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs:
            return
        short, result = call.short, call.outputs[0]
        if short in _MAKES and not result.requires_grad and result.dim() > 1:
            self._made[result] = call.site
        if not call.inputs:
            return
        source = call.inputs[0]
        if short == "scaled_dot_product_attention":
            self._added(call, argument(call, 3, "attn_mask"), "attn_mask")
        elif short == "multi_head_attention_forward":
            for name in ("attn_mask", "key_padding_mask"):
                self._added(call, call.kwargs.get(name), name)
        if source in self._weights and short in _MOVES:
            self._weights[result] = self._weights[source]
        if self._weights and (short in _FILLS | _PRODUCT or short == "where"):
            self._mend(call)
        if short in _SOFTMAX:
            if source in self._masked:
                self._softmax(call, self._masked[source])
        elif result.requires_grad:
            masked = self._mask(call)
            if masked is None and short in _KEEPS and result.shape == source.shape:
                masked = self._masked.get(source)
            if masked is not None:
                self._masked[result] = masked

    def _mask(self, call: OpCall) -> Masked | None:
        short, result = call.short, call.outputs[0]
        if short in _FILLS and len(call.inputs) > 1:
            value = argument(call, 2, "value")
            if type(value) in (int, float) and value > -1:
                return self._places(call, call.inputs[1], f"filled with {value:g}")
        elif short == "where" and len(call.args) == 3:
            mask, chosen, other = call.args
            number = isinstance(other, (int, float)) or (
                isinstance(other, Tensor) and other.numel() == 1 and not other.requires_grad
            )
            if number and isinstance(mask, Tensor) and isinstance(chosen, Tensor):
                value = float(other)
                if value > -1:
                    return self._places(call, ~mask.bool(), f"set to {value:g}")
        elif short in _PRODUCT | _SUM and len(call.inputs) == 2:
            scores, mask = call.inputs if call.inputs[0].requires_grad else call.inputs[::-1]
            if mask.requires_grad or scores.shape != result.shape or mask.dim() < 2:
                return None
            added = short in _SUM
            if added and (call.site is None or "mask" not in surroundings(call.site).lower()):
                return None
            if not self._is_zero_one(mask):
                return None
            how = "get 0 added, where the others get 1" if added else "multiplied by 0"
            return self._places(call, mask == 0, how)
        return None

    def _is_zero_one(self, mask: Tensor) -> bool:
        values = self.session.values(mask)
        if values is None or not values.numel():
            return False
        zero = values == 0
        return bool((zero | (values == 1)).all()) and bool(zero.any()) and not bool(zero.all())

    def _places(self, call: OpCall, mask: Tensor, how: str) -> Masked | None:
        values = self.session.values(mask)
        shape = call.outputs[0].shape
        try:
            places = None if values is None else values.bool().expand(shape)
        except RuntimeError:
            return None
        if places is None or not bool(places.any()):
            return None
        return Masked(places, how, call.site)

    def _softmax(self, call: OpCall, masked: Masked) -> None:
        source, result = call.inputs[0], call.outputs[0]
        axis = argument(call, 1, "dim")
        values = self.session.values(result)
        if type(axis) is not int or values is None or source.shape != masked.places.shape:
            return
        weights = values.detach().exp() if call.short == "log_softmax" else values.detach()
        places = masked.places
        mixed = (places.any(axis, keepdim=True) & ~places.all(axis, keepdim=True)).expand_as(places)
        if not bool(mixed.any()):
            return
        hidden, others = weights[places & mixed].mean(), weights[~places & mixed].mean()
        share = float(hidden / others) if float(others) else 0.0
        if share > _SHARE:
            live = live_in(self.session, [source])
            known = Masked(places, masked.how, masked.site or call.site, share, live)
            self._weights[result] = known
            self._open.append(known)

    def _mend(self, call: OpCall) -> None:
        """The weights are masked after the softmax as well."""
        for tensor in call.inputs:
            known = self._weights.get(tensor)
            others = [t for t in call.inputs if t is not tensor and not t.requires_grad]
            if known is not None and any(self._is_zero_one(t) for t in others):
                self._open = [one for one in self._open if one is not known]

    def step_ended(self, record: StepRecord) -> None:
        masks, self._open = self._open, []
        for masked in masks:
            steps = self._steps.setdefault(masked.site, set())
            steps.add(record.number)
            if len(steps) == _ENOUGH and masked.live:
                self._say(masked)

    def _say(self, masked: Masked) -> None:
        self.report(
            19,
            Severity.WARNING,
            f"A mask before a softmax hides nothing: scores are {masked.how}.",
            why=f"What is masked keeps {masked.share:.2g} of the weight of what is not: exp(0) is "
            "1, and only scores far below the others lose their share.",
            fix="masked_fill(mask, float('-inf')), with True where a place is to be left out.",
            site=masked.site,
            parameters=masked.live,
        )

    # masks that attention adds

    def _added(self, call: OpCall, mask: object, name: str) -> None:
        if not isinstance(mask, Tensor) or mask.requires_grad or not mask.is_floating_point():
            return
        live = live_in(self.session, call.inputs)
        if not live or not self._is_zero_one(mask):
            return
        site = self._made.get(mask) or call.site
        steps = self._steps.setdefault(site, set())
        steps.add(self.session.step)
        if len(steps) != _ENOUGH:
            return
        self.report(
            19,
            Severity.WARNING,
            f"{name} holds 0 and 1 of {str(mask.dtype).removeprefix('torch.')}, which attention "
            "adds to the scores: it hides nothing.",
            why="Only a mask of bool leaves places out. A score that is larger by 1 is some three "
            "times as much weight, no more.",
            fix="Pass a mask of bool (scaled_dot_product_attention: True takes part; "
            "nn.MultiheadAttention: True is left out), or 0 and -inf.",
            site=site,
            parameters=live,
            related=(call.site,),
        )
