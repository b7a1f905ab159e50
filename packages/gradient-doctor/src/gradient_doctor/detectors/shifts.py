"""Class 18: which token a language model is asked for.

Position t of a causal model has read tokens 0..t and is asked for token t + 1. Labels that were
shifted by the collator and again by the model ask for t + 2; labels that nobody shifted ask for
token t itself, which the model has just read. Both train without an error, and the loss falls.

Nothing is inferred from names. The ids that an embedding takes and the target of cross_entropy are
compared as numbers: the shift is the k for which target[t] = ids[t + k] wherever the target counts.
That row t of the logits belongs to position t of the ids is followed from the embedding on: a
prefix, a slice that does not begin at 0, a pad or a roll on the way, and nothing is said.
Heads that predict several tokens ahead are meant: a step in which any target has k = 1 is silent.
k = 0 is a fault only where the model cannot look ahead: reconstruction is a task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session, StepRecord

_ENOUGH = 2  # steps
_TOKENS = 12  # compared tokens that count as evidence
_DISTINCT = 4
_MOVES = {"cat", "concat", "stack", "pad", "roll", "flip", "gather", "index_select", "narrow"}
_KEEPS = {"contiguous", "view", "reshape", "flatten", "to", "long", "pad", "clone", "cat"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


@dataclass(frozen=True)
class Seen:
    """A loss of this step whose targets are the model's own ids, `shift` further on."""

    shift: int
    site: Site | None
    live: int


class Shifts(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._ids: list[Tensor] = []  # copies of what embeddings took in this step
        # values by position -> places in `_ids`, each with the position of its first token
        self._aligned = WeakIdKeyDictionary()
        self._moved = WeakIdKeyDictionary()  # labels -> the lines that have shifted them
        self._seen: list[Seen] = []
        self._leaks: list[tuple[Site | None, Site | None, int]] = []  # mixer, loss, parameters
        self._causal = False
        self._steps: dict[tuple[Site | None, int], set[int]] = {}
        # places in `_ids` -> a layer that mixes all positions of them, and hides none
        self._mixers: dict[int, Site | None] = {}
        self._weights = WeakIdKeyDictionary()  # softmax over positions -> its line

    def op(self, call: OpCall) -> None:
        if call.short == "embedding" and call.inputs:
            self._take(call)
        elif call.short == "scaled_dot_product_attention":
            self._causal |= bool(argument(call, 5, "is_causal", False))
            self._causal |= _is_triangle(argument(call, 3, "attn_mask"))
        elif call.short == "multi_head_attention_forward":
            self._causal |= bool(call.kwargs.get("is_causal"))
            self._causal |= _is_triangle(call.kwargs.get("attn_mask"))
        elif call.short in ("softmax", "masked_fill", "masked_fill_", "add", "add_", "where"):
            self._causal |= any(_is_triangle(t) for t in call.inputs[:3])
        elif call.short in _RECURRENT:
            self._causal |= not any(a is True for a in call.args[-2:-1])
        elif call.short == "cross_entropy" and self._ids:
            self._loss(call, argument(call, 1, "target"), argument(call, 4, "ignore_index", -100))
        elif call.short in ("gather", "take_along_dim") and self._ids and call.inputs:
            self._gathered(call)
        if call.outputs and call.inputs and not call.inputs[0].is_floating_point():
            self._shift(call)
        if self._ids and call.outputs:
            self._mix(call)
        self._align(call)

    def _shift(self, call: OpCall) -> None:
        """Labels that begin one later than what they were cut from."""
        source, result = call.inputs[0], call.outputs[0]
        lines = self._moved.get(source) or ()
        if call.short == "__getitem__" and _starts_later(call.args[1]):
            self._moved[result] = (*lines, call.site)
        elif lines and call.short in _KEEPS:
            self._moved[result] = lines

    def _mix(self, call: OpCall) -> None:
        """Attention that lets every position see all others."""
        site = call.site
        if call.short == "scaled_dot_product_attention":
            open_ = not argument(call, 5, "is_causal", False)
            open_ &= not _hides_later(argument(call, 3, "attn_mask"))
        elif call.short == "multi_head_attention_forward":
            mask = call.kwargs.get("attn_mask")
            self._check_padding(call)
            open_ = not call.kwargs.get("is_causal") and not _hides_later(mask)
            called = self.session.called
            outer = [called[m] for m in self.session.module_stack if m in called]
            site = outer[-1] if outer else site
        elif call.short == "softmax":
            if _sees_later(call.outputs[0]):
                self._weights[call.outputs[0]] = site
            return
        elif call.short in ("matmul", "bmm", "einsum", "__matmul__"):
            source = next((t for t in call.inputs if t in self._weights), None)
            open_ = source is not None
            site = None if source is None else self._weights[source]
        elif call.short in ("dropout", "to", "float", "view", "reshape") and call.inputs:
            known = self._weights.get(call.inputs[0])
            if known is not None and call.outputs[0].shape == call.inputs[0].shape:
                self._weights[call.outputs[0]] = known
            return
        else:
            return
        if open_:
            for tensor in call.inputs:
                for place, _ in self._aligned.get(tensor) or ():
                    self._mixers.setdefault(place, site)

    def _check_padding(self, call: OpCall) -> None:
        """key_padding_mask is True for what is left out: attention that sees padding alone."""
        mask = call.kwargs.get("key_padding_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return
        hidden = mask if mask.dtype == torch.bool else mask < -1e3
        for ids in self._ids:
            if ids.shape != hidden.shape or bool(hidden.all()) or not bool(hidden.any()):
                continue
            seen, unseen = ids[~hidden], ids[hidden]
            if len(seen.unique()) == 1 and len(unseen.unique()) >= _DISTINCT:
                called = self.session.called
                outer = [called[m] for m in self.session.module_stack if m in called]
                site = outer[-1] if outer else call.site
                steps = self._steps.setdefault((site, -1), set())
                steps.add(self.session.step)
                if len(steps) == _ENOUGH:
                    self._say_inverted(site, int(seen[0]), live_in(self.session, call.inputs))

    def _say_inverted(self, site: Site | None, token: int, live: int) -> None:
        self.report(
            19,
            Severity.WARNING,
            f"Attention sees nothing but token {token}: the mask of the padding is inverted.",
            why="key_padding_mask is True where a position is to be left out. This one is True "
            f"for all real tokens and False for token {token}, which fills up the rows.",
            fix="Pass the negation: key_padding_mask = (ids == pad).",
            site=site,
            parameters=live,
        )

    def _take(self, call: OpCall) -> None:
        ids = next((t for t in call.inputs if not t.is_floating_point()), None)
        if ids is not None and ids.dim() == 2 and ids.shape[1] > 2 and len(self._ids) < 8:
            values = self.session.values(ids)
            if values is not None:
                self._aligned[call.outputs[0]] = frozenset({(len(self._ids), 0)})
                self._ids.append(values.detach().clone())

    def _align(self, call: OpCall) -> None:
        if not self._ids or not call.outputs or call.short == "embedding":
            return
        places: frozenset[tuple[int, int]] = frozenset().union(
            *(self._aligned[t] for t in call.inputs if t in self._aligned)
        )
        if not places or call.outputs[0].dim() < 2:
            return
        if call.short in ("cat", "concat") and argument(call, 1, "dim", 0) in (1, -2):
            places = self._joined(call)
        elif call.short in _MOVES:
            return
        elif call.short == "__getitem__":
            start = _start(call.args[1])
            if start is None:
                return
            places = frozenset((place, first - start) for place, first in places)
        self._aligned[call.outputs[0]] = places

    def _joined(self, call: OpCall) -> frozenset[tuple[int, int]]:
        """A prefix in front of the tokens: they begin behind it."""
        places: set[tuple[int, int]] = set()
        width = 0
        for part in call.inputs:
            places |= {(place, first + width) for place, first in self._aligned.get(part) or ()}
            width += part.shape[1] if part.dim() > 1 else 0
        return frozenset(places)

    def _gathered(self, call: OpCall) -> None:
        """log_probs.gather(-1, ids.unsqueeze(-1)): the loss, written out."""
        taint = self.session.taint_of(call.inputs[0])
        index = next((t for t in call.inputs[1:] if not t.is_floating_point()), None)
        if taint is None or taint.op.rsplit(".", 1)[-1] not in ("log_softmax", "log"):
            return
        if index is not None and index.dim() == 3 and index.shape[-1] == 1:
            self._loss(call, index.squeeze(-1), -100)

    def _loss(self, call: OpCall, target: Any, ignored: int) -> None:
        prediction = argument(call, 0, "input")
        if not isinstance(target, Tensor) or target.is_floating_point():
            return
        places = {place for place, first in self._aligned.get(prediction) or () if first == 0}
        values = self.session.values(target)
        live = live_in(self.session, call.inputs)
        if values is None or not live:
            return
        for place in places:
            shift = shift_of(self._ids[place], values, ignored)
            if shift == 1 and place in self._mixers:
                self._leaks.append((self._mixers[place], call.site, live))
            if shift is not None:
                site = self._excess(target, call.site) if shift == 2 else call.site
                self._seen.append(Seen(shift, site, live))

    def _excess(self, target: Tensor, loss: Site | None) -> Site | None:
        """Of two shifts, that of the caller: the function of a loss shifts for all who call it."""
        moved = self._moved.get(target) or ()
        first = moved[0] if len(moved) > 1 else None
        elsewhere = first is not None and loss is not None and first.function != loss.function
        return first if elsewhere else loss

    def step_ended(self, record: StepRecord) -> None:
        seen, causal = self._seen, self._causal
        self._ids, self._seen, self._causal = [], [], False
        leaks, self._leaks = self._leaks, []
        self._mixers.clear()
        for mixer, loss, live in leaks if not causal else ():
            steps = self._steps.setdefault((mixer, 1), set())
            steps.add(record.number)
            if len(steps) == _ENOUGH:
                self._say_leak(mixer, loss, live)
        if any(one.shift == 1 for one in seen):
            return
        for one in seen:
            if one.shift == 2 or (one.shift == 0 and causal):
                steps = self._steps.setdefault((one.site, one.shift), set())
                steps.add(record.number)
                if len(steps) >= _ENOUGH:
                    self._say(one)

    def _say_leak(self, mixer: Site | None, loss: Site | None, live: int) -> None:
        self.report(
            19,
            Severity.WARNING,
            "Position t is asked for token t + 1, and can see it: nothing hides later positions.",
            why=f"Compared as numbers, the target at {loss} is the next token of the model's own "
            "input, and this attention has no mask: the answer is copied, the loss falls, and "
            "nothing is learnt that helps where the next token is not there yet.",
            fix="Pass a causal mask (is_causal=True, or torch.triu(..., 1) of True).",
            site=mixer,
            parameters=live,
            related=(loss,),
        )

    def _say(self, one: Seen) -> None:
        if one.shift == 2:
            what = "Position t is trained on token t + 2: the labels are shifted twice."
            why = (
                "Compared as numbers, the target at t is the input token at t + 2. The data were "
                "shifted by one when they were made, and the loss shifts them again: no position "
                "is ever asked for the next token."
            )
            fix = "Shift once: pass unshifted labels here, or remove the shift before the loss."
        else:
            what = "Position t is trained on token t, which it has just read."
            why = (
                "Compared as numbers, the target is the input itself, and the model looks at no "
                "later token: copying its input makes the loss 0, and nothing is predicted."
            )
            fix = "Shift by one: logits[:, :-1] against tokens[:, 1:]."
        self.report(
            18,
            Severity.WARNING,
            what,
            why=why,
            fix=fix,
            site=one.site,
            parameters=one.live,
        )


@torch.no_grad()
def shift_of(ids: Tensor, target: Tensor, ignored: int) -> int | None:
    """The k of 0, 1, 2 for which target[t] = ids[t + k]; None if there is none, or several."""
    rows, width = ids.shape
    if target.dim() == 1 and len(target) % rows == 0:
        target = target.reshape(rows, -1)
    if target.dim() != 2 or len(target) != rows or not width - 2 <= target.shape[1] <= width:
        return None
    counts = target != ignored
    fits = []
    for shift in (0, 1, 2):
        length = min(target.shape[1], width - shift)
        here = counts[:, :length]
        # what lies beyond the ids is made up: padding, or the first token of the next text
        equal = (target[:, :length] == ids[:, shift : shift + length]) | ~here
        enough = int(here.sum()) >= _TOKENS
        varied = len(target[:, :length][here].unique()) >= _DISTINCT
        if enough and varied and bool(equal.all()):
            fits.append(shift)
    return fits[0] if len(fits) == 1 else None


def _hides_later(mask: object) -> bool:
    """Whether a mask, of any number of axes, hides every later position."""
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    if not bool(later.any()):
        return True
    beyond = mask.detach()[..., later]
    if mask.dtype == torch.bool:  # True means either, by function
        return bool(beyond.all()) or not bool(beyond.any())
    return bool((beyond < -1e3).all())


def _sees_later(weights: Tensor) -> bool:
    """Whether weights of a softmax over positions lie on later ones."""
    if weights.dim() < 3 or weights.shape[-1] != weights.shape[-2] or weights.shape[-1] < 3:
        return False
    later = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).triu(1)
    return bool((weights.detach()[..., later] > 1e-6).any())


def _starts_later(index: Any) -> bool:
    """`[:, 1:]`, `[..., 1:]`."""
    last = index[-1] if isinstance(index, tuple) and index else index
    return isinstance(last, slice) and last.start == 1


def _start(index: Any) -> int | None:
    """Where the second axis begins after `[:, 2:]`, `[..., :]`; None for anything else."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(part, slice) and part is not Ellipsis for part in parts):
        return None
    steps = [part.start or 0 for part in parts if part is not Ellipsis]
    if any(start < 0 for start in steps) or sum(steps) != sum(steps[1:2]):
        return None
    return (
        steps[1] if len(steps) > 1 and parts[0] is not Ellipsis else 0 if not sum(steps) else None
    )


def _is_triangle(mask: object) -> bool:
    """Whether a mask hides exactly what comes later."""
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    size = mask.shape[-1]
    if size < 3 or mask.numel() != mask.shape[-1] * mask.shape[-2] or mask.requires_grad:
        return False
    plain = mask.detach().reshape(size, size)
    later = torch.ones(size, size, dtype=torch.bool, device=plain.device).triu(1)
    if plain.dtype == torch.bool:
        return bool((plain == later).all()) or bool((plain == ~later).all())
    if not plain.is_floating_point():
        return bool(((plain != 0) == ~later).all())
    hidden = plain < -1e3
    return bool((hidden == later).all()) or bool(((plain == 1) == ~later).all())
