"""Class 33: the norm of a gradient penalty runs over the wrong axes.

A critic gives each sample one score, so the slope that a Wasserstein critic must keep at 1 is the
norm of a sample's whole gradient. `gradients.norm(2, dim=1)` of [batch, channels, height, width] is
one norm for each pixel; without `dim` it is one for the whole batch. Scores for each point of a
sample (an implicit surface) have a norm for each point: there nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import live_in, shape
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, OpCall, Session

_SUMS = {"sum", "mean"}
_KEEPS = {"view", "reshape", "flatten", "squeeze", "contiguous", "to", "float", "add", "clamp"}
_ROOTS = {"sqrt", "pow", "__pow__", "sum", "__add__"}
_SQUARES = {"pow", "square", "mul", "abs"}
_NORMS = {"norm", "vector_norm"}
_LESS = {"sub", "rsub", "__sub__", "__rsub__", "subtract", "__add__", "add"}


@dataclass(frozen=True)
class Slopes:
    """Gradients of one score for each sample, or what a norm has made of them."""

    batch: int
    whole: tuple[int, ...]  # the shape of the gradient
    norm: Site | None = None  # the line that took it
    squared: bool = False


class Penalties(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._sums = WeakIdKeyDictionary()  # a sum -> the shape of what was summed
        self._slopes = WeakIdKeyDictionary()  # values -> Slopes

    def op(self, call: OpCall) -> None:
        if not call.inputs or not call.outputs:
            return
        source, result = call.inputs[0], call.outputs[0]
        if not result.dim() and call.short in _SUMS and result.requires_grad:
            self._sums[result] = tuple(source.shape)
        slopes = self._slopes.get(source) if self._slopes else None
        if slopes is not None and result not in self._slopes:
            self._follow(call, slopes, source, result)

    def backward_ended(self, backward: Backward) -> None:
        if backward.kind != "grad" or not self.session.record.traced or not backward.results:
            return
        scores = backward.roots[0]
        scored = self._sums[scores] if scores in self._sums else tuple(scores.shape)
        for tensor, gradient in zip(backward.inputs or [], backward.results):
            several = sum(n > 1 for n in tensor.shape[1:]) > 1
            batch = tensor.shape[0] if tensor.dim() else 0
            # one score for each sample; a gradient that can be learnt from
            if gradient is None or not gradient.requires_grad or not several or batch < 2:
                continue
            if len(backward.roots) == 1 and scored[:1] == (batch,) and _size(scored) == batch:
                self._slopes[gradient] = Slopes(batch, tuple(gradient.shape))

    def _follow(self, call: OpCall, slopes: Slopes, source: Tensor, result: Tensor) -> None:
        short = call.short
        if slopes.norm is not None:
            number = next((a for a in call.args[1:] if isinstance(a, (int, float))), None)
            if short in _LESS and number is not None and abs(number) == 1:
                self._judge(slopes, source)
            elif short in _ROOTS | _KEEPS | _NORMS:
                self._slopes[result] = slopes
        elif short in _NORMS or (short == "sum" and slopes.squared):
            self._slopes[result] = Slopes(slopes.batch, slopes.whole, call.site)
        elif short in _SQUARES | {"__pow__", "__mul__"} and result.shape == source.shape:
            self._slopes[result] = Slopes(slopes.batch, slopes.whole, None, True)
        elif short in _KEEPS:
            self._slopes[result] = slopes

    def _judge(self, slopes: Slopes, norms: Tensor) -> None:
        """`norms - 1`: there must be as many of them as samples."""
        live, number = live_in(self.session, [norms]), norms.numel()
        if number == slopes.batch or not live or slopes.norm is None:
            return
        one = number == 1
        self.report(
            33,
            Severity.WARNING,
            "The gradient penalty takes one norm for the whole batch."
            if one
            else f"The gradient penalty takes {number} norms for {slopes.batch} samples.",
            why=f"The gradient is {list(slopes.whole)}, its norm {shape(norms)}: "
            + (
                "the gradients of all samples together are held at 1, so that of each is smaller "
                "the larger the batch."
                if one
                else "each place of a sample is held at 1 by itself, and the gradient of the "
                "whole sample is far larger."
            ),
            fix="Flatten each sample first: gradients.flatten(1).norm(2, dim=1).",
            site=slopes.norm,
            parameters=live,
        )


def _size(lengths: Any) -> int:
    size = 1
    for n in lengths:
        size *= n
    return size
