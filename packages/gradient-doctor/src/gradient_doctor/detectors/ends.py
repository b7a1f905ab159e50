"""Class 19: no loss asks for the token that ends a text.

Every row ends with one and the same token before its padding, the loss asks for the tokens before
it, and never for this one: a mask that is cut one too early or too late. What the model writes will
not end. So it is where the padding has the number of a real token, and the loss ignores that
number where a mask of the program's own would count it.

Places are read from the gradient of the logits: a place counts if it has one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.detectors.shifts import shift_of
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import MARK, node_of
from gradient_doctor.pads import inferred_pad
from gradient_doctor.session import Detector, OpCall, Session, StepRecord

_ENOUGH = 2  # steps
_ROWS = 4
_MOST = 0.9  # of the rows end so
_IDS = {"cross_entropy", "nll_loss"}
_KEEPS = {"view", "reshape", "flatten", "float", "to", "contiguous", "bool", "long", "type_as"}


class Ends(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._ids: list[Tensor] = []  # copies of what embeddings took in this step
        self._cut = WeakIdKeyDictionary()  # data that was sliced, and casts of it -> the line
        self._ignored = WeakIdKeyDictionary()  # losses by place -> (ignored places, id, line)
        self._mask: Site | None = None  # of this step: the slice that a loss was multiplied with
        self._steps: dict[tuple[str, Site | None], set[int]] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        short, source, result = call.short, call.inputs[0], call.outputs[0]
        if short == "embedding":
            ids = next((t for t in call.inputs if not t.is_floating_point()), None)
            if ids is not None and ids.dim() == 2 and ids.shape[1] > 2 and len(self._ids) < 8:
                values = self.session.values(ids)
                if values is not None:
                    self._ids.append(values.detach().clone())
        elif short in _IDS:
            self._loss(call)
        elif short in ("mul", "multiply") and len(call.inputs) == 2 and result.requires_grad:
            self._multiply(call)
        elif short == "__getitem__" and not result.requires_grad:
            self._cut[result] = call.site
        elif short in _KEEPS and source in self._cut:
            self._cut[result] = self._cut[source]
        if short in ("__getitem__", *_KEEPS) and source in self._ignored:
            places, token, site = self._ignored[source]
            if short == "__getitem__":
                places = places.reshape(source.shape)[call.args[1]]
            self._ignored[result] = (places, token, site)

    def step_ended(self, record: StepRecord) -> None:
        self._ids.clear()
        self._mask = None

    def _loss(self, call: OpCall) -> None:
        logits, target = argument(call, 0, "input"), argument(call, 1, "target")
        if not isinstance(logits, Tensor) or not isinstance(target, Tensor) or not self._ids:
            return
        ignored = argument(call, 4, "ignore_index", -100)
        values = None if target.is_floating_point() else self.session.values(target)
        node = node_of(logits)
        if values is None or node is None:
            return
        fits = [ids for ids in self._ids if shift_of(ids, values, ignored) == 1]
        if not fits:
            return
        if argument(call, 6, "reduction", "mean") == "none" and ignored >= 0:
            places = values == ignored
            if _is_a_word(fits[0], ignored) and bool(places.any()):
                self._ignored[call.outputs[0]] = (places, ignored, call.site)
        ends = _ends(fits[0])
        if ends is None:
            return
        rows = fits[0].shape[0]
        live = live_in(self.session, [logits])
        token, places = ends

        def observe(gradient: Tensor) -> None:
            counts = (gradient != 0).any(1).reshape(rows, -1)
            self._judge(counts, places, token, live, call.site)

        cast(dict[str, Any], node.metadata)[MARK + ".ends"] = observe

    def _judge(
        self, counts: Tensor, places: Tensor, token: int, live: int, loss: Site | None
    ) -> None:
        """`places`: of each row, the place that should be asked for the last token; -1 is none."""
        rows = (places >= 0) & (places < counts.shape[1])
        rows &= counts.any(1)
        if int(rows.sum()) < _ROWS:
            return
        at = counts[rows].gather(1, places[rows].unsqueeze(1))
        site = self._mask or loss
        if bool(at.any()) or not self._again("ends", site):
            return
        self.report(
            19,
            Severity.WARNING,
            f"No loss asks for token {token}, which ends every text.",
            why=f"It is the last token of {int(rows.sum())} rows before their padding; the tokens "
            "before it count in the loss, this one in none of them: the mask of the loss is "
            "shifted by one place, or one too short. The model does not learn to end.",
            fix="Shift the mask as the labels are shifted: the place that predicts the last token "
            "must be 1.",
            site=site,
            parameters=live,
            related=(loss,),
        )

    def _multiply(self, call: OpCall) -> None:
        mask = next((t for t in call.inputs if not t.requires_grad), None)
        loss = next((t for t in call.inputs if t.requires_grad), None)
        if mask is None or loss is None or mask.numel() != loss.numel():
            return
        self._mask = self._cut.get(mask) or self._mask
        known = self._ignored.get(loss)
        if known is None:
            return
        places, token, site = known
        ours = self.session.values(mask)
        if ours is None or not bool(((ours == 0) | (ours == 1)).all()):
            return
        both = int((places.reshape(-1) & (ours.reshape(-1) == 1)).sum())
        if not both or not self._again("ignored", site):
            return
        self.report(
            19,
            Severity.WARNING,
            f"The loss ignores token {token} at {both} places that the mask counts.",
            why=f"Token {token} stands between other tokens of these texts, so it is more than "
            "padding; ignore_index takes it out wherever it stands, also where the mask is 1. The "
            "model never learns to say it.",
            fix="Leave it to the mask (drop ignore_index), or give the padding a number of its "
            "own.",
            site=site,
            parameters=live_in(self.session, [loss]),
            related=(call.site,),
        )

    def _again(self, kind: str, site: Site | None) -> bool:
        steps = self._steps.setdefault((kind, site), set())
        steps.add(self.session.step)
        return len(steps) == _ENOUGH


def _ends(ids: Tensor) -> tuple[int, Tensor] | None:
    """The token that ends the rows, and the place before it in each; None if they end otherwise."""
    pad = inferred_pad(ids)
    if pad is None or bool((ids[:, 0] == pad).any()):
        return None
    lengths = (ids != pad).sum(1)
    rows = torch.arange(len(ids), device=ids.device)
    last = ids[rows, lengths - 1]
    token = int(last.mode().values)
    own = last == token
    inner = ids.clone()
    inner[rows, lengths - 1] = pad
    if float(own.float().mean()) < _MOST or bool((inner == token).any()):
        return None
    return token, torch.where(own, lengths - 2, torch.full_like(lengths, -1))


def _is_a_word(ids: Tensor, token: int) -> bool:
    """Whether a token stands before another one, in most of the rows."""
    followed = (ids[:, :-1] == token) & (ids[:, 1:] != token)
    return bool(followed.any(1).float().mean() > 0.5)
