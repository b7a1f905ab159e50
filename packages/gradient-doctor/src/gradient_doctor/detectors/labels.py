"""Class 19: labels at padding that pass for a class of their own data.

A loss for each token averages over all positions. Where rows are padded, and the label there is one
that real tokens have as well ("not replaced", "O", 0), padding teaches: most of the mean is easy,
and the loss depends on the width of the batch. Which positions are padding is known from an
embedding's `padding_idx`, or from `pad_sequence` that made the labels. A label that stands at
padding only may be meant, and is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.pads import padded_places
from gradient_doctor.session import Detector, OpCall, Session, StepRecord

_ENOUGH = 2  # steps
_IDS = ("cross_entropy", "nll_loss")
_LOGITS = "binary_cross_entropy_with_logits"
_FOLLOWED = {
    *("view", "reshape", "flatten", "contiguous", "transpose", "t", "permute", "__getitem__"),
    *("long", "float", "to", "clone", "squeeze", "unsqueeze"),
}
_CASTS = {"long", "float", "to"}
_HIDDEN = -1e3  # a logit that a mask has written


@dataclass
class Counted:
    """A loss to which padding contributes."""

    live: int
    pads: int
    of: int
    label: float
    steps: set[int] = field(default_factory=set)


class Labels(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._pads: list[tuple[Tensor, int]] = []  # of ids in this step, and who embeds them
        self._padded = WeakIdKeyDictionary()  # labels of pad_sequence -> where they are padding
        self._counted: dict[Site, Counted] = {}

    def op(self, call: OpCall) -> None:
        short = call.short
        if short == "embedding":
            pad, weight = argument(call, 2, "padding_idx", -1), argument(call, 1, "weight")
            if pad is not None and pad >= 0 and torch.is_grad_enabled():
                self._note(call.args[0], pad, self.session.registry.bit(weight))
        elif short == "pad_sequence" and call.outputs:
            self._pad_sequence(call)
        elif short in _FOLLOWED and call.inputs and call.inputs[0] in self._padded:
            places = self._padded[call.inputs[0]]
            if short not in _CASTS:
                places = getattr(places, short)(*call.args[1:], **call.kwargs)
            if call.outputs and places.shape == call.outputs[0].shape:
                self._padded[call.outputs[0]] = places
        elif short in (*_IDS, _LOGITS) and call.site is not None:
            self._loss(call, call.site)

    # what is padding

    def _note(self, ids: Any, pad: int, bit: int) -> None:
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return
        pads = padded_places(ids, pad)
        # rows of several lengths, and an id that stands nowhere else
        lengths = pads.sum(1)
        ragged = bool((lengths != lengths[0]).any()) and int((lengths > 1).sum()) > 1
        if ragged and bool((pads == (ids == pad)).all()):
            self._pads.append((pads, bit))

    def _pad_sequence(self, call: OpCall) -> None:
        parts, result = call.args[0], call.outputs[0]
        if argument(call, 2, "padding_value", 0) != 0 or result.dim() < 2:
            return
        lengths = [len(part) for part in parts]
        if len({*lengths}) == 1 or argument(call, 3, "padding_side", "right") != "right":
            return
        places = torch.zeros(result.shape, dtype=torch.bool)
        for row, length in enumerate(lengths):
            if argument(call, 1, "batch_first", False):
                places[row, length:] = True
            else:
                places[length:, row] = True
        self._padded[result] = places

    # losses

    def _loss(self, call: OpCall, site: Site) -> None:
        prediction, target = argument(call, 0, "input"), argument(call, 1, "target")
        if not isinstance(prediction, Tensor) or not isinstance(target, Tensor):
            return
        ids = call.short in _IDS
        reduction = argument(call, 6 if ids else 5, "reduction", "mean")
        weight = argument(call, 2, "weight")
        if reduction == "none" or weight is not None or (ids and target.is_floating_point()):
            return
        live = live_in(self.session, [prediction])
        places = self._places(prediction, target, live)
        if not live or places is None:
            return
        labels = target.detach().reshape(-1)
        at_pads, real = labels[places], labels[~places]
        ignored = argument(call, 4, "ignore_index", -100) if ids else None
        if not at_pads.numel() or bool((at_pads != at_pads[0]).any()):
            return
        label = at_pads[0]
        if label == ignored or not bool((real == label).any()) or bool((real == label).all()):
            return
        if _is_masked(prediction.detach(), places, ids):
            return
        counted = self._counted.setdefault(
            site, Counted(live, int(places.sum()), places.numel(), float(label))
        )
        counted.steps.add(self.session.step)

    def _places(self, prediction: Tensor, target: Tensor, live: int) -> Tensor | None:
        """Which of the labels, in their flat order, stand at padding."""
        padded = self._padded.get(target)
        if padded is not None:
            return padded.reshape(-1) if bool(padded.any()) else None
        base = prediction._base
        # values for each token: a tensor [batch, length, ...], or a flat view of one
        if prediction.dim() != 3 and (base is None or base.dim() != 3):
            return None
        fits = [
            pads
            for pads, bit in self._pads
            if bit & live
            and pads.numel() == target.numel()
            and target.dim() in (1, 2, 3)
            and (target.dim() == 1 or target.shape[:2] == pads.shape)
        ]
        if not fits or any(bool((pads != fits[0]).any()) for pads in fits[1:]):
            return None
        return fits[0].reshape(-1)

    # verdicts

    def step_ended(self, record: StepRecord) -> None:
        self._pads.clear()
        if record.traced and self.session.age + 1 >= self.session.trace_steps:
            self._judge(_ENOUGH)

    def finish(self, error: BaseException | None) -> None:
        self._judge(1)

    def _judge(self, enough: int) -> None:
        for site, counted in list(self._counted.items()):
            if len(counted.steps) < enough:
                continue
            del self._counted[site]
            self.report(
                19,
                Severity.WARNING,
                f"Padding counts in the loss: {counted.pads} of {counted.of} labels stand at "
                "padding.",
                why=f"All of them are {counted.label:g}, which real positions have as well: the "
                "model is taught this label by padding, and the mean is taken over too many "
                "positions.",
                fix="Give these positions the ignore_index (-100), or take the loss at the others "
                "alone, divided by their number.",
                site=site,
                parameters=counted.live,
            )


def _is_masked(prediction: Tensor, places: Tensor, classes: bool) -> bool:
    """Whether the predictions at these places are constants that a mask has put there."""
    if classes and prediction.dim() > 2:
        prediction = prediction.movedim(1, -1)
    rows = prediction.reshape(places.numel(), -1)[places]
    if classes:
        return bool((rows == rows[:, :1]).all())
    return bool(((rows == 0) | (rows < _HIDDEN)).all())
