"""Class 33: a softmax over the samples of a batch, where it should be over classes or places.

Which axis a softmax should sum to 1 over is known from the loss. nll_loss takes its classes from
axis 1. Rows that are compared with one target each are samples: a softmax over axis 0 that they
come from gives each sample a share of the batch. `nn.Softmax()` without an axis takes axis 0 of
three.

The same axis is meant where it holds steps of time, or the members of one set that is summed over
it, or where a matrix of all pairs is read by columns: then axis 0 is moved, or summed, before the
loss, and nothing is said.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.axes import MOVES, moved
from gradient_doctor.detectors.common import argument, live_in, shape
from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session, StepRecord

_ENOUGH = 2  # steps
_SOFTMAX = {"softmax", "log_softmax"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_RESHAPES = {"view", "reshape", "flatten", "unflatten"}
_REDUCES = {"sum", "mean", "amax", "max", "min", "amin", "logsumexp", "prod", "std", "var", "norm"}
_PRODUCTS = {"matmul", "mm", "bmm", "linear", "__matmul__"}
_LOSSES = {
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
}


class Normalised(NamedTuple):
    """Values that a softmax has made, and the axis over which they sum to 1."""

    axis: int
    size: int
    site: Site
    what: str


class RowSoftmax(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._scores = WeakIdKeyDictionary()  # results of a softmax, also moved
        self._rows = WeakIdKeyDictionary()  # values made of a softmax over axis 0, which they keep
        self._by_time = WeakIdKeyDictionary()  # axis 0 is time: no samples
        self._roots = WeakIdKeyDictionary()  # scores -> what they were before a factor
        # of this step: roots of what cross_entropy took, and kl_div over axis 0
        self._classes: list[object] = []
        self._divergences: list[tuple[Normalised, int, Site | None, object]] = []
        self._steps: dict[Site, set[int]] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        if call.short in _SOFTMAX:
            self._softmax(call)
            return
        if call.short in _RECURRENT and len(call.args) > 7 and call.args[-1] is False:
            self._by_time[call.outputs[0]] = True
        if call.short in _LOSSES:
            self._loss(call)
        elif call.short in ("div", "mul", "float") and len(call.inputs) == 1:
            self._roots[call.outputs[0]] = self._root_of(call.inputs[0])
        if self._scores:
            self._follow_scores(call)
        for known in (self._rows, self._by_time):
            carrier = next((t for t in call.inputs if t in known), None) if known else None
            if carrier is not None and _keeps_rows(call, carrier):
                known[call.outputs[0]] = known[carrier]

    def _softmax(self, call: OpCall) -> None:
        source, result = call.inputs[0], call.outputs[0]
        axis = argument(call, 1, "dim")
        if axis is None:  # as torch chooses it
            axis = 0 if source.dim() in (0, 1, 3) else 1
        if type(axis) is not int or not result.requires_grad or source.dim() < 2:
            return
        axis %= source.dim()
        stack = self.session.module_stack
        own = stack and type(stack[-1]).__module__.startswith("torch.nn")
        site = (birth_site(self.session.registry, stack[-1]) if own else None) or call.site
        if site is None or source.shape[axis] < 2:
            return
        self._roots[result] = self._root_of(source)
        made = Normalised(
            axis, source.shape[axis], site, f"{call.short} of {shape(source)} is over axis {axis}"
        )
        self._scores[result] = made
        if axis == 0 and source not in self._by_time:
            self._rows[result] = made

    def _follow_scores(self, call: OpCall) -> None:
        source, result = call.inputs[0], call.outputs[0]
        made = self._scores.get(source)
        if made is None or result in self._scores:
            return
        if call.short in MOVES:
            places = moved(call, source, result)
            if places is not None and made.axis in places:
                self._scores[result] = made._replace(axis=places.index(made.axis))
        elif call.short in _RESHAPES:
            last = source.dim() - 1
            if result.dim() == 2 and result.shape[-1] == source.shape[-1]:
                self._scores[result] = made._replace(axis=1 if made.axis == last else 0)
        elif result.shape == source.shape and call.short in ("log", "clamp", "add", "contiguous"):
            self._scores[result] = made

    def _loss(self, call: OpCall) -> None:
        prediction, target = argument(call, 0, "input"), argument(call, 1, "target")
        if not (isinstance(prediction, Tensor) and isinstance(target, Tensor)):
            return
        made = self._scores.get(prediction)
        live = live_in(self.session, call.inputs)
        if call.short == "nll_loss" and made is not None and prediction.dim() > 1:
            if made.axis != 1 and prediction.shape[1] > 1:
                self._say(made, live, call.site, "the classes of this loss are on axis 1")
            return
        if call.short == "cross_entropy":
            self._classes.append(self._root_of(prediction))
        if call.short == "kl_div":
            # of relations between samples, perhaps; not of what has its classes on axis 1
            if made is not None and made.axis == 0 and prediction.dim() == 2:
                self._divergences.append((made, live, call.site, self._root_of(prediction)))
            return
        made = self._rows.get(prediction)
        rows = prediction.shape[:1] == target.shape[:1]
        if made is not None and rows and made.size == prediction.shape[0]:
            reason = "axis 0 holds the samples: each has a target of its own"
            self._say(made, live, call.site, reason)

    def step_ended(self, record: StepRecord) -> None:
        for made, live, site, root in self._divergences:
            if root in self._classes:
                reason = "cross_entropy takes axis 1 of the same scores for classes"
                self._say(made, live, site, reason)
        self._divergences.clear()
        self._classes.clear()

    def _root_of(self, scores: Tensor) -> object:
        """A token of what these scores were before they were divided."""
        root = self._roots.get(scores)
        if root is None:
            root = self._roots[scores] = object()
        return root

    def _say(self, made: Normalised, live: int, site: Site | None, reason: str) -> None:
        steps = self._steps.setdefault(made.site, set())
        steps.add(self.session.step)
        if not live or len(steps) < _ENOUGH:
            return
        self.report(
            33,
            Severity.WARNING,
            f"{made.what}, but {reason}.",
            why=f"{made.size} values that belong to different samples or places share a sum of 1: "
            "the more one gets, the less is left for the others.",
            fix="Give softmax the axis of the classes (or of the places that are weighed): dim=-1, "
            "or dim=1 of [batch, classes, ...].",
            site=made.site,
            parameters=live,
            related=(site,),
        )


def _keeps_rows(call: OpCall, carrier: Tensor) -> bool:
    """Whether axis 0 of the result is that of this input."""
    result, short = call.outputs[0], call.short
    if result.shape[:1] != carrier.shape[:1] or not result.dim() or short in MOVES:
        return False
    if short == "einsum" or (short in _PRODUCTS and call.inputs[0] is not carrier):
        return False
    if short in _REDUCES:
        return 0 not in _axes(argument(call, 1, "dim"), carrier.dim())
    if short in _RESHAPES or short in ("__getitem__", "squeeze", "unsqueeze"):
        return True
    # a smaller one is stretched over the last axes of a larger one
    return short in _PRODUCTS or carrier.dim() == result.dim()


def _axes(dim: Any, rank: int) -> set[int]:
    dims = dim if isinstance(dim, (tuple, list)) else [dim]
    return {d % rank for d in dims if type(d) is int} or {0}
