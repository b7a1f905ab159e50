"""Class 19: rows of different lengths, and what treats their padded ends as text.

Padding is known from the ids that an embedding takes: its padding_idx, or an id that fills the ends
of rows of different lengths and stands nowhere else. Three rules. The next-token targets of these
rows go into the loss with their padding. The state of a recurrent network after the last position
is taken, when most of what it has read is padding. The mean over time is taken with the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.axes import MOVES
from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.detectors.masks import ID_LOSSES
from gradient_doctor.findings import Severity, Site
from gradient_doctor.pads import inferred_pad, padded_places
from gradient_doctor.session import Detector, OpCall, Session, StepRecord

_MEANS = {"mean", "sum", "div", "__truediv__", "true_divide", "adaptive_avg_pool1d"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_MUCH = 0.25  # of the targets
_MOST = 0.5  # of what a recurrent network reads


@dataclass(frozen=True)
class Rows:
    """Ids that an embedding took, with padded ends or beginnings."""

    ids: Tensor
    pad: int
    pads: Tensor
    ends: Tensor  # of these, what stands after the text


@dataclass(frozen=True)
class States:
    """What a recurrent network made of such rows, one axis being time."""

    time: int
    length: int
    share: float  # of padding in what it has read
    rows: int  # that end in padding
    of: int
    site: Site | None


class Ragged(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._rows: list[Rows] = []
        self._states = WeakIdKeyDictionary()
        self._final = WeakIdKeyDictionary()
        self._texts = WeakIdKeyDictionary()  # values per position of such rows, not masked -> rows
        self._turned = WeakIdKeyDictionary()  # the same with the axis of time last
        self._sums = WeakIdKeyDictionary()  # sums over time of such values -> rows
        self._leaks: dict[Site | None, set[int]] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs:
            return
        if call.short == "embedding":
            self._embedded(call)
        elif not self._rows:
            return
        elif call.short in ID_LOSSES:
            self._loss(call)
        elif call.short in _RECURRENT:
            self._read(call)
        elif call.short == "__getitem__":
            self._taken(call)
        elif call.short in _MEANS and call.inputs and self._averages(call):
            self._mean(call, self._text_behind(call))
        else:
            self._follow(call)
            self._follow_states(call)
            for tensor in call.inputs:
                if tensor in self._final:
                    self._say_state(self._final[tensor], self._final[tensor].site, call)

    def step_ended(self, record: StepRecord) -> None:
        self._rows.clear()

    def _embedded(self, call: OpCall) -> None:
        ids = argument(call, 0, "input")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            return
        values = self.session.values(ids)
        known = argument(call, 2, "padding_idx")
        if values is None or not values.numel():
            return
        known = known if isinstance(known, int) and known >= 0 else None
        for rows in (values, values.T):  # [batch, time] or [time, batch]
            pad = inferred_pad(rows) if known is None else known
            if pad is not None:
                pads = padded_places(rows, pad)
                if bool(pads.any()):
                    self._rows.append(Rows(rows.clone(), pad, pads, _at_ends(pads)))
                    if rows is values:
                        self._texts[call.outputs[0]] = self._rows[-1]
                    return

    # targets

    def _loss(self, call: OpCall) -> None:
        target = argument(call, 1, "target")
        if not isinstance(target, Tensor) or target.is_floating_point() or not target.numel():
            return
        ignored = argument(call, 4, "ignore_index", -100)
        live = live_in(self.session, call.inputs[:1])
        if argument(call, 2, "weight") is not None or not live:
            return
        if argument(call, 6, "reduction", "mean") == "none":
            return  # a mask may follow
        for rows in self._rows:
            pads = None if ignored == rows.pad else _next_pads(rows, target)
            if pads is not None and int(pads.sum()) >= _MUCH * pads.numel():
                self._say_leak(call, rows, pads, live)
                return

    def _say_leak(self, call: OpCall, rows: Rows, pads: Tensor, live: int) -> None:
        steps = self._leaks.setdefault(call.site, set())
        steps.add(self.session.step)
        if len(steps) < 2:
            return
        self.report(
            19,
            Severity.WARNING,
            f"Padding counts in the loss: {int(pads.sum())} of {pads.numel()} targets are token "
            f"{rows.pad}, at an end of rows.",
            why="The rows have different lengths and this token fills them up; the model is taught "
            "to predict padding, which is easy, and the mean hides the rest.",
            fix=f"Pass ignore_index={rows.pad} to {call.short}, or give these places the label "
            "-100.",
            site=call.site,
            parameters=live,
        )

    # means over time

    def _follow(self, call: OpCall) -> None:
        """The same positions; what meets anything of their shape without features is masked."""
        self._turn(call)
        rows = next((self._texts[t] for t in call.inputs if t in self._texts), None)
        result = call.outputs[0]
        if rows is None or result.dim() != 3 or tuple(result.shape[:2]) != tuple(rows.ids.shape):
            return
        others = [t for t in call.inputs if t not in self._texts and t.dim() > 1]
        if not any(tuple(t.shape[:2]) == tuple(rows.ids.shape) for t in others):
            self._texts[result] = rows

    def _turn(self, call: OpCall) -> None:
        """[batch, time, width] becomes [batch, width, time], as convolutions and pooling want."""
        if not call.inputs or call.outputs[0].dim() != 3:
            return
        source, result = call.inputs[0], call.outputs[0]
        if call.short in MOVES and source in self._texts:
            if (result.shape[0], result.shape[2]) == tuple(self._texts[source].ids.shape):
                self._turned[result] = self._texts[source]
        elif source in self._turned and result.shape[2] == (length := source.shape[2]):
            masked = any(t.dim() > 1 and t.shape[-1] == length for t in call.inputs[1:])
            if not masked:
                self._turned[result] = self._turned[source]

    def _text_behind(self, call: OpCall) -> Rows | None:
        for known in (self._texts, self._turned, self._sums):
            if call.inputs[0] in known:
                return known[call.inputs[0]]
        return None

    def _averages(self, call: OpCall) -> bool:
        """Whether the call takes a mean over time; a sum is remembered until it is divided."""
        source, second = call.inputs[0], argument(call, 1, "dim")
        if call.short in ("div", "__truediv__", "true_divide"):
            rows = self._sums.get(source)
            return rows is not None and second == rows.ids.shape[1]
        if call.short == "adaptive_avg_pool1d":
            size = argument(call, 1, "output_size")
            return source in self._turned and size in (1, (1,), [1])
        if source in self._turned:
            over_time = second in (2, -1, (2,), [2], (-1,), [-1])
        else:
            over_time = source in self._texts and second in (1, -2, (1,), [1], (-2,), [-2])
        if over_time and call.short == "sum":
            self._sums[call.outputs[0]] = self._text_behind(call)
        return over_time and call.short == "mean"

    def _mean(self, call: OpCall, rows: Rows | None) -> None:
        live = live_in(self.session, call.inputs)
        if rows is None or not live:
            return
        share = int(torch.count_nonzero(rows.pads)) / max(rows.pads.numel(), 1)
        if share < _MUCH:
            return
        steps = self._leaks.setdefault(call.site, set())
        steps.add(self.session.step)
        if len(steps) < 2:
            return
        self.report(
            19,
            Severity.WARNING,
            f"The mean over {rows.ids.shape[1]} positions includes the padding of "
            f"{int(rows.pads.any(1).sum())} of {len(rows.ids)} rows.",
            why=f"{share:.0%} of the positions are token {rows.pad}, at an end of rows: the "
            "result depends on how long a row is, and on the longest row of its batch.",
            fix="Sum over the tokens of each row, and divide by their number: "
            "(h * mask).sum(1) / mask.sum(1).",
            site=call.site,
            parameters=live,
        )

    # recurrent networks

    def _read(self, call: OpCall) -> None:
        stack = self.session.module_stack
        module = stack[-1] if stack and isinstance(stack[-1], nn.RNNBase) else None
        data = call.inputs[0]
        if module is None or data.dim() != 3:
            return  # packed sequences have no padding
        time = 1 if module.batch_first else 0
        size = (data.shape[1 - time], data.shape[time])
        rows = next((r for r in self._rows if tuple(r.ids.shape) == size), None)
        if rows is None:
            return
        share = int(torch.count_nonzero(rows.ends)) / max(rows.ends.numel(), 1)
        ends = int(rows.ends[:, -1].sum())
        states = States(time, size[1], share, ends, size[0], call.site)
        self._states[call.outputs[0]] = states
        for final in call.outputs[1:]:
            self._final[final] = states

    def _follow_states(self, call: OpCall) -> None:
        """Dropout, a norm, a layer for each step; not what a mask may have gone into."""
        source, size = call.inputs[0] if call.inputs else None, call.outputs[0].shape[:2]
        if source is None or source not in self._states or source.shape[:2] != size:
            return
        if not any(t.dim() > 1 and t.shape[:2] == size for t in call.inputs[1:]):
            self._states[call.outputs[0]] = self._states[source]

    def _taken(self, call: OpCall) -> None:
        source = call.inputs[0]
        index = call.args[1] if len(call.args) > 1 else None
        states = self._states.get(source)
        if states is not None and _is_last(index, states):
            self._say_state(states, call.site, call)
        elif source in self._final:
            self._say_state(self._final[source], self._final[source].site, call)

    def _say_state(self, states: States, site: Site | None, call: OpCall) -> None:
        live = live_in(self.session, call.outputs)
        if states.share < _MOST or not live:
            return
        self.report(
            19,
            Severity.WARNING,
            f"The state after the last position is used, but {states.rows} of {states.of} rows end "
            "in padding.",
            why=f"{states.share:.0%} of what the recurrent network has read is padding: after the "
            "text it goes on over it, and its last state has forgotten the text.",
            fix="Use pack_padded_sequence with the lengths, or take each row's state at its own "
            "last token.",
            site=site,
            parameters=live,
            related=(states.site,),
        )


def _next_pads(rows: Rows, target: Tensor) -> Tensor | None:
    """The padding among targets that are these rows, or the same rows one token later."""
    count, length = rows.ids.shape
    if target.numel() % count:
        return None
    target = target.detach().reshape(count, -1)
    width = target.shape[1]
    for shift in (1, 0):
        shared = min(width, length - shift)
        if shared > 1 and torch.equal(rows.ids[:, shift : shift + shared], target[:, :shared]):
            return padded_places(target, rows.pad)
    return None


def _at_ends(pads: Tensor) -> Tensor:
    return pads.flip(1).long().cumprod(1).bool().flip(1)


def _is_last(index: Any, states: States) -> bool:
    index = index if isinstance(index, tuple) else (index,)
    if len(index) <= states.time or (states.time == 1 and index[0] != slice(None)):
        return False
    return isinstance(index[states.time], int) and index[states.time] in (-1, states.length - 1)
