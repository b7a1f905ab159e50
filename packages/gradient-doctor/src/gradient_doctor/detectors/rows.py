"""Class 18: row k of the predictions is compared with the target of another sample.

Rows keep their order through layers. Where the inputs were shuffled (indexed by a permutation) and
their targets were cut unshuffled from data of the same length, or by another permutation, each
prediction meets the answer to another question; so it does where each input was repeated K times
side by side (repeat_interleave), and the targets were repeated as a whole (repeat, tile).

A target that was made after the shuffle, of what was shuffled or of Python's numbers, may be in any
order.

What is made of shuffled and of unshuffled rows together (mixup) has no order that is known. All
pairs of N inputs with N targets are meant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.axes import MOVES
from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session

_ENOUGH = 2  # steps
_LOSSES = {
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "sub", "__rsub__"),
}
_PLAIN = {"randn", "rand", "randn_like", "rand_like", "zeros", "ones", "zeros_like", "ones_like"}
_REDUCES = {"sum", "mean", "amax", "max", "min", "argmax", "sort", "argsort", "flip", "roll"}


class Order(NamedTuple):
    """How the rows of a tensor were ordered.

    `kind`: shuffled, whole (a slice of rows as they stood), each (side by side), tiled.
    """

    kind: str
    rows: int  # of the data before; of one copy
    key: int  # of the permutation; how many copies
    start: int  # of a slice
    site: Site | None


class Rows(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._permutations = WeakIdKeyDictionary()  # -> (rows, a number of its own, start)
        self._orders = WeakIdKeyDictionary()
        self._plain = WeakIdKeyDictionary()  # noise and constants: their rows have no order
        # made since a permutation, of it or of what it has shuffled, or of no tensor at all
        self._fresh = WeakIdKeyDictionary()
        self._count = 0
        self._steps: dict[Site | None, set[int]] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs:
            return
        short, result = call.short, call.outputs[0]
        if self._count:
            self._note_fresh(call, result)
        if short == "randperm":
            self._count += 1
            self._permutations[result] = (len(result), self._count, 0)
            return
        if short in _PLAIN:
            self._plain[result] = True
            return
        if not call.inputs:
            return
        if short in _LOSSES and len(call.inputs) > 1:
            self._compare(call)
        source = call.inputs[0]
        if short == "__getitem__":
            self._index(call, source)
        elif short == "index_select" and argument(call, 1, "dim") == 0:
            self._pick(source, argument(call, 2, "index"), call)
        elif short == "repeat_interleave":
            number = argument(call, 1, "repeats")
            if type(number) is int and argument(call, 2, "dim") == 0:
                self._orders[result] = Order("each", len(source), number, 0, call.site)
        elif short in ("repeat", "tile"):
            sizes = call.args[1] if isinstance(call.args[1], (tuple, list)) else call.args[1:]
            flat = len(sizes) == source.dim() and all(n == 1 for n in sizes[1:])
            if flat and type(sizes[0]) is int and sizes[0] > 1:
                self._orders[result] = Order("tiled", len(source), sizes[0], 0, call.site)
        elif result.dim() and result not in self._orders:
            self._follow(call)

    def _note_fresh(self, call: OpCall, result: Tensor) -> None:
        known = (self._permutations, self._orders, self._fresh)
        if not call.inputs or any(t in one for t in call.inputs for one in known):
            self._fresh[result] = True

    def _index(self, call: OpCall, source: Tensor) -> None:
        index = call.args[1]
        if isinstance(index, tuple) and index and _is_full(index[0]):  # of each row a part
            if source in self._orders:
                self._orders[call.outputs[0]] = self._orders[source]
            return
        if isinstance(index, tuple):
            index = index[0] if index and all(map(_is_full, index[1:])) else None
        if isinstance(index, Tensor):
            self._pick(source, index, call)
            return
        plain = isinstance(index, slice) and index.step in (None, 1)
        if not plain or not source.dim():
            return
        start = index.start or 0 if isinstance(index, slice) else -1
        start = int(start) if isinstance(start, (int, Tensor)) else -1
        known = self._permutations.get(source)
        if known is not None and start >= 0:  # a batch of a permutation
            self._permutations[call.outputs[0]] = (known[0], known[1], known[2] + start)
            return
        order: Order | None = self._orders.get(source)
        if start < 0 or len(call.outputs[0]) == len(source):
            if order is not None:
                self._orders[call.outputs[0]] = order
        elif order is None:
            self._orders[call.outputs[0]] = Order("whole", len(source), 0, start, call.site)
        elif order.kind in ("shuffled", "whole"):
            self._orders[call.outputs[0]] = order._replace(start=order.start + start)

    def _pick(self, source: Tensor, index: Any, call: OpCall) -> None:
        known = self._permutations.get(index) if isinstance(index, Tensor) else None
        if known is not None and source.dim() and len(source) == known[0]:
            rows, key, start = known
            self._orders[call.outputs[0]] = Order("shuffled", rows, key, start, call.site)

    def _follow(self, call: OpCall) -> None:
        """Rows stay where they are, unless two orders meet."""
        result, short = call.outputs[0], call.short
        if short in MOVES or short in _REDUCES:
            return
        if short in ("cat", "stack", "concat") and argument(call, 1, "dim", 0) == 0:
            return
        length = result.shape[0]
        rows = [t for t in call.inputs if t.dim() and t.shape[0] == length and not _is_weight(t)]
        rows = [t for t in rows if t not in self._plain]
        orders = {self._orders.get(t) for t in rows}
        if len(orders) == 1 and None not in orders:
            [order] = orders
            self._orders[result] = order
        elif len({o and o[:4] for o in orders}) == 1 and None not in orders:
            self._orders[result] = next(iter(orders))

    def _compare(self, call: OpCall) -> None:
        left, right = call.inputs[:2]
        prediction, target = (left, right) if left.requires_grad else (right, left)
        if not prediction.requires_grad or target.requires_grad or not target.dim():
            return
        if not prediction.dim() or prediction.shape[0] != target.shape[0]:
            return
        ours, theirs = self._orders.get(prediction), self._orders.get(target)
        if ours is None:
            return
        reason = self._reason(ours, theirs, target)
        live = live_in(self.session, [prediction])
        if not reason or not live:
            return
        site = ours.site if theirs is None or theirs.kind == "whole" else theirs.site
        steps = self._steps.setdefault(site, set())
        steps.add(self.session.step)
        if len(steps) != _ENOUGH:
            return
        self.report(
            18,
            Severity.WARNING,
            "Predictions are compared with the targets of other samples.",
            why=reason + " Each answer belongs to another question, and nothing can be learnt but "
            "the mean of the answers.",
            fix="Shuffle inputs and targets by the same permutation; repeat both in the same way.",
            site=site,
            parameters=live,
            related=(ours.site, None if theirs is None else theirs.site, call.site),
        )

    def _reason(self, ours: Order, theirs: Order | None, target: Tensor) -> str:
        if ours.kind == "shuffled":
            old = theirs is None and target not in self._fresh
            whole = old and len(target) == ours.rows > 1 and self._is_data(target)
            cut = theirs is not None and theirs.kind == "whole" and theirs.rows == ours.rows
            if whole or cut:
                return "The inputs were shuffled, their targets were not."
            both = theirs is not None and theirs.kind == "shuffled" and theirs.rows == ours.rows
            if theirs is not None and both and theirs.key != ours.key:
                return "Inputs and targets were shuffled by two permutations."
        kinds = {ours.kind, "" if theirs is None else theirs.kind}
        if theirs is not None and kinds == {"each", "tiled"}:
            same = ours.rows == theirs.rows and ours.key == theirs.key
            if same and ours.rows != ours.key:
                return (
                    f"{ours.rows} samples were repeated {ours.key} times: a, a, b, b on one side, "
                    "and a, b, a, b on the other."
                )
        return ""

    def _is_data(self, target: Tensor) -> bool:
        """Not constants, and no numbers of places: those mean what they say in any order."""
        values = self.session.values(target)
        if values is None or not values.numel():
            return False
        flat = values.reshape(len(values), -1)[:, 0]
        if bool((flat == flat[0]).all()):
            return False
        return not bool((flat == torch.arange(len(flat), device=flat.device)).all())


def _is_full(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)
