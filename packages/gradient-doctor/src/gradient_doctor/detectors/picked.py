"""Class 20: a maximum, or a minimum, that always picks what a mask has filled in.

The hardest negative of each sample is a maximum over scores, with the sample itself masked. Where
the fill has the wrong sign, the fill is the greatest of every row: the term depends on nothing that
learns, and a hinge behind it is shut or open for good. The loss may have other terms, so that all
parameters move.

The line is that of the fill.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session

_ENOUGH = 2  # steps
_LARGE = 1e3
_FILLS = {"masked_fill", "masked_fill_", "fill_", "where", "__setitem__", "fill_diagonal_"}
_FILLS |= {"add", "sub", "mul", "full", "full_like", "diagonal_scatter"}
_PICKS = {"max", "min", "amax", "amin"}


class Picked(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._filled = WeakIdKeyDictionary()  # values with large constants among them -> the line
        self._steps: dict[Site | None, set[int]] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs:
            return
        result = call.outputs[0]
        if call.short in _PICKS:
            self._pick(call, result)
        elif call.short in _FILLS and any(map(_is_large, (*call.args, *call.kwargs.values()))):
            self._filled[result] = call.site
            base = result._base
            if base is not None:
                self._filled[base] = call.site
        elif self._filled:
            known = next((t for t in call.inputs if t in self._filled), None)
            if known is not None:
                self._filled[result] = self._filled[known]

    def _pick(self, call: OpCall, result: Tensor) -> None:
        source = call.inputs[0] if call.inputs else None
        if source is None or source not in self._filled or not 1 < result.numel() < source.numel():
            return
        live = live_in(self.session, [source])
        values, out = self.session.values(source), self.session.values(result)
        if not live or values is None or out is None or not out.is_floating_point():
            return
        first = out.reshape(-1)[0]
        others = values[values != first]
        filled = abs(float(first)) >= _LARGE and bool((out == first).all())
        if not filled or len(others) < result.numel() or bool((others == others[0]).all()):
            return
        site = self._filled[source]
        steps = self._steps.setdefault(site, set())
        steps.add(self.session.step)
        if len(steps) != _ENOUGH:
            return
        self.report(
            20,
            Severity.ERROR,
            f"The {call.short} picks the value that a mask has filled in, for every sample.",
            why=f"All {out.numel()} results of {call.short} at {call.site} are {float(first):g}, "
            f"which was written here; the other {len(others)} values lie between "
            f"{float(others.min()):.3g} and {float(others.max()):.3g}. No gradient reaches them: "
            "what is made of this trains nothing.",
            fix="Fill with the other sign: -inf where a maximum is taken, +inf where a minimum is.",
            site=site,
            parameters=live,
            related=(call.site,),
        )


def _is_large(argument: Any) -> bool:
    if isinstance(argument, Tensor):
        return argument.numel() == 1 and not argument.requires_grad and _is_large(argument.item())
    return isinstance(argument, (int, float)) and abs(argument) >= _LARGE
