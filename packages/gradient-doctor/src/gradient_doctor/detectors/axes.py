"""Class 33: one axis is taken for another, and samples, steps or features are mixed.

`view` and `reshape` read the numbers in their old order; they merge and split neighbouring axes,
and cannot exchange them. An axis that is broken up while its length turns up again elsewhere in the
new shape was meant to be moved: `x.view(batch, classes, time)` of [batch, time, classes],
`h.view(batch, -1)` of a recurrent layer's [directions, batch, width].

Recurrent layers and attention mix what lies along their axis of time, and keep apart what lies
along that of the batch. Which axis holds the samples is known from layers that have no choice
(convolutions, batch norm), and from the loss: rows that are compared with one target each.

A loss over flattened values pairs them by their place: [time, batch] flattened against a target
[batch, time] flattened compares each with the answer of another (18).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in, shape
from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session, StepRecord

_ENOUGH = 2  # steps
_RESHAPES = {"view", "reshape", "unflatten", "flatten"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_BATCH_FIRST = {
    "conv1d": 3,
    "conv2d": 4,
    "conv3d": 5,
    "max_pool1d": 3,
    "max_pool2d": 4,
    "batch_norm": 0,
    "conv_transpose1d": 3,
    "conv_transpose2d": 4,
    "adaptive_avg_pool2d": 4,
}
_READERS = {
    *("linear", "conv1d", "conv2d", "conv3d", "multi_head_attention_forward"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", *_RECURRENT),
}
MOVES = {"transpose", "swapaxes", "swapdims", "permute", "t", "T", "movedim", "moveaxis"}
_REDUCES = {"mean", "sum", "amax", "max"}
_CLASSES = {"cross_entropy", "nll_loss"}
_LOSSES = _CLASSES | {
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    "binary_cross_entropy_with_logits",
}


@dataclass(frozen=True)
class Layer:
    """A layer that mixes along one axis: where it was made and called."""

    made: Site | None
    call: Site | None
    time: int  # axes of its output
    batch: int


@dataclass
class Suspect:
    """A line, over the steps of the trace."""

    number: int
    what: str
    why: str
    fix: str
    related: tuple[Site | None, ...]
    live: int
    steps: set[int]


class Axes(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._samples = WeakIdKeyDictionary()  # values -> the axis of the samples
        self._mixed = WeakIdKeyDictionary()  # values of a layer that mixes -> Layer
        self._by_time = WeakIdKeyDictionary()  # values whose rows are steps of time -> Layer
        self._flattened = WeakIdKeyDictionary()  # values -> the leading axes that were merged
        self._broken = WeakIdKeyDictionary()  # output of a reshape that broke an axis -> its line
        self._broken_data = WeakIdKeyDictionary()  # the same of what needs no gradient
        self._cut_up = WeakIdKeyDictionary()  # the same where rows may have been put together
        self._suspects: dict[tuple[Site, int], Suspect] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        if call.short in _READERS and self._broken_data:
            self._read(call)
        if call.short in _LOSSES:
            self._loss(call)
        elif call.short == "ctc_loss":
            self._ctc(call)
        elif call.short in _RESHAPES:
            self._reshape(call)
        elif call.short in _RECURRENT and len(call.args) > 7:
            self._recurrent(call)
        elif call.short == "multi_head_attention_forward":
            self._attention(call)
        else:
            self._follow(call)

    # reshapes

    def _reshape(self, call: OpCall) -> None:
        source, result = call.inputs[0], call.outputs[0]
        old, new = tuple(source.shape), tuple(result.shape)
        self._flatten(source, result, old, new)
        if old and new and old[0] == new[0] and self._samples.get(source) == 0:
            self._samples[result] = 0
        if call.site is not None and exchanged(old, new):
            self._cut_up[result] = (call.site, call.short, old, new)
        if not is_exchange(old, new) or call.site is None:
            return
        if result.requires_grad:
            self._broken[result] = call.site
            self._exchanges(call.site, call.short, old, new, live_in(self.session, [source]))
        elif result.is_floating_point() and len(old) > 2:
            self._broken_data[result] = (call.site, call.short, old, new)

    def _exchanges(self, site: Site, short: str, old: Any, new: Any, live: int) -> None:
        lengths = " and ".join(map(str, sorted(exchanged(old, new))))
        self._suspect(
            (site, 33),
            f"`{short}` of {list(old)} to {list(new)} mixes axes: it cannot exchange them.",
            f"The numbers keep their order, so the axis of length {lengths} is cut up, and what "
            "stands in its new place are pieces of several others: samples, steps or features "
            "trade values.",
            f"Move the axis with transpose() or permute() first, then {short}.",
            live,
        )

    def _read(self, call: OpCall) -> None:
        """A layer takes data whose axes a reshape has mixed."""
        broken = self._broken_data.get(call.inputs[0])
        live = live_in(self.session, call.inputs) if broken is not None else 0
        if broken is not None and live:
            site, short, old, new = broken
            self._exchanges(site, short, old, new, live)

    def _flatten(self, source: Tensor, result: Tensor, old: Any, new: Any) -> None:
        """Two leading axes that became one."""
        rest = len(new) - 1
        if len(old) == rest + 2 and old[2:] == new[1:] and old[0] * old[1] == new[0]:
            self._flattened[result] = (old[0], old[1])

    # layers

    def _layer(self, call: OpCall, time: int, batch: int) -> Layer:
        stack, registry = self.session.module_stack, self.session.registry
        made = birth_site(registry, stack[-1]) if stack else None
        if stack and made is None:  # a copy (nn.TransformerEncoder): where the first was made
            sites = map(registry.prototypes.get, stack[-1].parameters())
            made = next((site for site in sites if site is not None), None)
        called = self.session.called.get(stack[-1]) if stack else None
        return Layer(made, called or call.site, time, batch)

    def _recurrent(self, call: OpCall) -> None:
        source, batch_first = call.inputs[0], call.args[-1]
        if source.dim() != 3 or not isinstance(batch_first, bool):
            return  # packed, or without a batch
        time, batch = (1, 0) if batch_first else (0, 1)
        self._states(call)
        layer = self._layer(call, time, batch)
        self._check_samples(source, layer)
        self._mixed[call.outputs[0]] = layer

    def _states(self, call: OpCall) -> None:
        """The state that it begins with is [layers, batch, width]: no rows are put together."""
        states = call.args[1] if isinstance(call.args[1], (tuple, list)) else [call.args[1]]
        for state in states:
            broken = self._cut_up.get(state) if isinstance(state, Tensor) else None
            if broken is not None:
                site, short, old, new = broken
                self._exchanges(site, short, old, new, live_in(self.session, call.inputs))

    def _attention(self, call: OpCall) -> None:
        query = call.inputs[0]
        if query.dim() == 3 and call.outputs[0].dim() == 3:
            layer = self._layer(call, 0, 1)
            self._check_samples(query, layer)
            self._mixed[call.outputs[0]] = layer

    def _check_samples(self, source: Tensor, layer: Layer) -> None:
        """A layer whose time is the axis of the samples."""
        known = self._samples.get(source)
        if known != layer.time or source.shape[layer.batch] == 1 or layer.call is None:
            return
        self._runs_over_samples(layer, source, live_in(self.session, [source]))

    def _runs_over_samples(self, layer: Layer, values: Tensor, live: int) -> None:
        site = layer.made or layer.call
        if site is None:
            return
        self._suspect(
            (site, 33),
            "A layer takes the axis of the samples for that of time.",
            f"It gets or gives {shape(values)}; its steps go along axis {layer.time} and its "
            f"samples along axis {layer.batch}, but it is axis {layer.time} that holds the "
            "samples: each of them is mixed with its neighbours in the batch.",
            "Set batch_first to the order that the data have, or transpose them before.",
            live,
            layer.call,
        )

    # what keeps the order of the axes

    def _follow(self, call: OpCall) -> None:
        source, result = call.inputs[0], call.outputs[0]
        least = _BATCH_FIRST.get(call.short)
        if least is not None and source.dim() >= max(least, 2) and result.dim() == source.dim():
            self._samples[result] = 0
        for known in (
            *(self._samples, self._mixed, self._by_time, self._flattened, self._broken),
            *(self._broken_data, self._cut_up),
        ):
            if not known:
                continue
            carrier = next((t for t in call.inputs if t in known), None)
            if carrier is not None and result not in known:
                self._carry(known, carrier, call)

    def _carry(self, known: Any, source: Tensor, call: OpCall) -> None:
        result = call.outputs[0]
        kept = known[source]
        same = result.dim() == source.dim() and result.shape[:-1] == source.shape[:-1]
        if known is self._flattened or known is self._by_time:
            rows = result.shape[:1] == source.shape[:1] != ()
            if rows and call.short not in MOVES:
                known[result] = kept
            return
        if known is self._broken or known is self._broken_data or known is self._cut_up:
            if result.shape == source.shape and call.short not in MOVES:
                known[result] = kept
            return
        if call.short in MOVES or call.short in ("squeeze", "unsqueeze"):
            places = moved(call, source, result)
            if places is None:
                return
            if known is self._samples:
                if kept in places:
                    known[result] = places.index(kept)
            elif kept.time in places and kept.batch in places:
                known[result] = Layer(
                    kept.made, kept.call, places.index(kept.time), places.index(kept.batch)
                )
        elif same and source.dim() > 1:
            known[result] = kept
        elif known is self._mixed:
            self._take(source, kept, call)

    def _take(self, source: Tensor, layer: Layer, call: OpCall) -> None:
        """One sample of several is taken, or their mean, where it should be a step of time."""
        result = call.outputs[0]
        axis: Any = None
        if call.short == "__getitem__" and isinstance(call.args[1], tuple):
            index = call.args[1]
            places = [k for k, part in enumerate(index) if type(part) is int]
            whole = all(type(p) is int or p == slice(None) for p in index)
            axis = places[0] if len(places) == 1 and whole else None
        elif call.short == "select" or call.short in _REDUCES:
            axis = argument(call, 1, "dim")
        if type(axis) is not int or source.dim() != 3 or layer.time != 0:
            return
        axis %= source.dim()
        if axis == layer.batch and source.shape[axis] > 1 and result.shape[0] == source.shape[0]:
            self._by_time[result] = layer

    # losses

    def _loss(self, call: OpCall) -> None:
        prediction, target = argument(call, 0, "input"), argument(call, 1, "target")
        if not (isinstance(prediction, Tensor) and isinstance(target, Tensor)):
            return
        live = live_in(self.session, call.inputs)
        if not live or not prediction.dim() or not target.dim():
            return
        layer = self._by_time.get(prediction)
        if layer is not None and target.shape[0] == prediction.shape[0] > 1:
            self._runs_over_samples(layer, prediction, live)
        broken = self._broken.get(prediction)
        if broken is not None and call.short in _CLASSES and (broken, 33) in self._suspects:
            # the loss has told the shape that it wants: the fault is one of its arguments
            suspect = self._suspects.pop((broken, 33))
            suspect.number = 18
            self._suspects.setdefault((broken, 18), suspect).steps |= suspect.steps
        ours, theirs = self._flattened.get(prediction), self._flattened.get(target)
        if ours and theirs and ours == theirs[::-1] and ours[0] != ours[1] and call.site:
            self._suspect(
                (call.site, 18),
                f"Predictions are flattened from {list(ours)}, their targets from {list(theirs)}.",
                "The loss pairs them by their place in the flat order, which is another one: most "
                "predictions are compared with the answer to a different input.",
                "Bring both into the same order of axes before they are flattened.",
                live,
            )

    def _ctc(self, call: OpCall) -> None:
        """It takes time first; a layer that has just read the data knows which axis that is."""
        layer = self._mixed.get(call.inputs[0])
        if layer is None or call.inputs[0].dim() != 3 or layer.time != 1 or call.site is None:
            return
        self._suspect(
            (call.site, 33),
            "ctc_loss takes the axis of the samples for that of time.",
            f"It wants [time, batch, classes] and gets {shape(call.inputs[0])} of a layer whose "
            f"steps go along axis {layer.time}: both lengths happen to fit.",
            "Transpose: log_probs.transpose(0, 1).",
            live_in(self.session, call.inputs),
            layer.call,
        )

    # verdicts

    def _suspect(
        self, key: tuple[Site, int], what: str, why: str, fix: str, live: int, *related: Site | None
    ) -> None:
        fresh = Suspect(key[1], what, why, fix, related, live, set())
        suspect = self._suspects.setdefault(key, fresh)
        suspect.live |= live
        suspect.steps.add(self.session.step)

    def step_ended(self, record: StepRecord) -> None:
        if record.traced and self.session.age + 1 >= self.session.trace_steps:
            self._judge(_ENOUGH)

    def finish(self, error: BaseException | None) -> None:
        self._judge(1)

    def _judge(self, enough: int) -> None:
        for (site, number), suspect in list(self._suspects.items()):
            if len(suspect.steps) < enough or not suspect.live & self.session.ledger.should_train():
                continue
            del self._suspects[site, number]
            self.report(
                suspect.number,
                Severity.WARNING,
                suspect.what,
                why=suspect.why,
                fix=suspect.fix,
                site=site,
                parameters=suspect.live,
                related=suspect.related,
            )


def _boundaries(lengths: tuple[int, ...]) -> list[int]:
    return list(itertools.accumulate(lengths, lambda a, b: a * b, initial=1))


def exchanged(old: tuple[int, ...], new: tuple[int, ...]) -> set[int]:
    """Lengths of axes that a reshape cuts up and that turn up in another place.

    Borders that both shapes have part them into blocks. A block that has one axis on either side is
    split or merged, and nothing in it is exchanged.
    """
    before, after = ([n for n in lengths if n > 1] for lengths in (old, new))
    borders = sorted(set(_boundaries(tuple(before))) & set(_boundaries(tuple(after))))
    out: set[int] = set()
    for low, high in itertools.pairwise(borders):
        cut_up, placed = _within(before, low, high), _within(after, low, high)
        if len(cut_up) > 1 and len(placed) > 1:
            out |= set(cut_up) & set(placed)
    return out


def _within(lengths: list[int], low: int, high: int) -> list[int]:
    """The axes between two borders."""
    borders = _boundaries(tuple(lengths))
    return [n for k, n in enumerate(lengths) if low <= borders[k] and borders[k + 1] <= high]


def is_exchange(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether a reshape was meant to exchange axes.

    Rows of several samples that are put side by side, or taken apart, have the lengths of an
    exchange where the width happens to be the number of samples.
    """
    if not exchanged(old, new):
        return False
    if len(old) == len(new) == 2:
        return bool(old[0] % new[0] and new[0] % old[0])
    return old[0] == new[0] or bool(old[0] % new[0])


def moved(call: OpCall, source: Tensor, result: Tensor) -> list[int] | None:
    """For each axis of the result, which of the source's it is; -1 for one that is new."""
    axes = list(range(source.dim()))
    short, args = call.short, call.args
    if short in ("transpose", "swapaxes", "swapdims"):
        first, second = argument(call, 1, "dim0"), argument(call, 2, "dim1")
        if type(first) is not int or type(second) is not int:
            return None
        axes[first], axes[second] = axes[second], axes[first]
        return axes
    if short in ("t", "T"):
        return axes[::-1]
    if short == "permute":
        order = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        return [k % source.dim() for k in order] if len(order) == source.dim() else None
    if short in ("movedim", "moveaxis"):
        first, second = argument(call, 1, "source"), argument(call, 2, "destination")
        if type(first) is not int or type(second) is not int:
            return None
        axes.insert(second % source.dim(), axes.pop(first))
        return axes
    dim = argument(call, 1, "dim")
    if short == "unsqueeze" and type(dim) is int:
        axes.insert(dim % (source.dim() + 1), -1)
        return axes
    if short == "squeeze":
        gone = {dim % source.dim()} if type(dim) is int and source.dim() else None
        kept = [k for k in axes if source.shape[k] > 1 or (gone is not None and k not in gone)]
        return kept if len(kept) == result.dim() else None
    return None
