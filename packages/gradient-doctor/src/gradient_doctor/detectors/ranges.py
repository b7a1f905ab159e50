"""Class 20, before it comes true: a last activation that cannot reach the targets.

ReLU gives nothing below 0, a sigmoid nothing outside of 0 and 1, tanh nothing beyond 1. Compared
with targets out there, the units behind it are driven to the end of its range, where its slope is 0
(or, for tanh and sigmoid, next to nothing), and stay.

And units that began as copies of each other: all rows of a weight are equal, so are their
gradients, and they stay copies for ever. The layer is as wide as one unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import checksum
from gradient_doctor.session import Detector, OpCall, Session, StepRecord

_RANGES = {
    **dict.fromkeys(("relu", "relu_", "softplus"), (0.0, math.inf)),
    **dict.fromkeys(("sigmoid", "sigmoid_", "softmax", "hardsigmoid"), (0.0, 1.0)),
    **dict.fromkeys(("tanh", "tanh_", "hardtanh", "softsign"), (-1.0, 1.0)),
    "relu6": (0.0, 6.0),
}
_SAME = {
    *("view", "reshape", "squeeze", "unsqueeze", "flatten", "transpose", "permute", "contiguous"),
    *("float", "to", "clone", "__getitem__", "stack", "cat", "mean", "expand"),
}
_COMPARES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
_SIZES = {"pow", "__pow__", "square", "abs"}
_SHARE = 0.25  # of the targets that lie outside
_MARGIN = 0.1  # beyond the end of the range
_ENOUGH = 2  # steps
_ROUNDING = 1e-5
_PRODUCTS = {"linear", "addmm", "matmul", "mm", "bmm", "__matmul__", "__rmatmul__"}


@dataclass(frozen=True)
class Bounded:
    """Values that an activation gave."""

    name: str
    low: float
    high: float
    site: Site | None


@dataclass
class Outside:
    """Targets beyond the range of one activation."""

    bounded: Bounded
    at: Site | None
    share: float
    least: float
    greatest: float
    live: int
    steps: set[int] = field(default_factory=set)


class Ranges(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._bounded = WeakIdKeyDictionary()
        self._differences = WeakIdKeyDictionary()  # value - target -> both facts
        self._outside: dict[Site | None, Outside] = {}
        self._judged = False
        self._first: dict[int, float] = {}  # checksums of weights whose rows are equal
        self._weights = 0  # what a layer multiplies by: its rows are units

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        result, source = call.outputs[0], call.inputs[0]
        if call.short in _PRODUCTS:
            weights = [t for t in call.inputs if isinstance(t, nn.Parameter)]
            self._weights |= self.session.registry.bits(weights)
        if call.short in _RANGES and result.requires_grad:
            low, high = _RANGES[call.short]
            site = self._layer() or call.site
            self._bounded[result] = Bounded(call.short.rstrip("_"), low, high, site)
        elif not self._bounded:
            return
        elif call.short in _SAME:
            known = [self._bounded.get(t) for t in call.inputs]
            if known[0] is not None and all(k is not None for k in known):
                for output in call.outputs:
                    self._bounded[output] = known[0]
        elif call.short in _COMPARES:
            self._compare(call, argument(call, 0, "input"), argument(call, 1, "target"))
        elif call.short == "sub" and len(call.inputs) == 2:
            self._differences[result] = (call.inputs[0], call.inputs[1])
        elif call.short in _SIZES and source in self._differences:
            self._compare(call, *self._differences[source])

    def _layer(self) -> Site | None:
        stack = self.session.module_stack
        own = stack and type(stack[-1]).__module__.startswith("torch.nn.modules.activation")
        return birth_site(self.session.registry, stack[-1]) if own else None

    def _compare(self, call: OpCall, left: object, right: object) -> None:
        for value, target in ((left, right), (right, left)):
            if not (isinstance(value, Tensor) and isinstance(target, Tensor)):
                return
            bounded = self._bounded.get(value)
            if bounded is not None and not target.requires_grad:
                self._judge_targets(call, bounded, value, target)

    def _judge_targets(self, call: OpCall, bounded: Bounded, value: Tensor, target: Tensor) -> None:
        values, live = self.session.values(target), live_in(self.session, [value])
        if values is None or not values.numel() or not live or value.shape != target.shape:
            return
        outside = (values < bounded.low - _MARGIN) | (values > bounded.high + _MARGIN)
        share = int(torch.count_nonzero(outside)) / outside.numel()
        if share < _SHARE:
            return
        least, greatest = float(values.min()), float(values.max())
        fact = Outside(bounded, call.site, share, least, greatest, live)
        self._outside.setdefault(bounded.site, fact).steps.add(self.session.step)

    # rows that are copies

    def _copies(self) -> dict[int, Tensor]:
        registry = self.session.registry
        copies: dict[int, Tensor] = {}
        for parameter in registry.parameters().values():
            wide = isinstance(parameter, nn.Parameter) and parameter.dim() == 2
            if not wide or min(parameter.shape) < 2 or not parameter.requires_grad:
                continue
            values = self.session.values(parameter)
            if values is None or not bool(values.any()):
                continue
            # products may be summed in another order for each row
            apart = float((values - values[:1]).abs().max())
            if apart <= _ROUNDING * float(values.abs().max()):
                copies[registry.bit(parameter)] = parameter
        return copies

    def step_ended(self, record: StepRecord) -> None:
        if not record.traced:
            return
        if not self.session.age:
            self._first = {bit: checksum(weight) for bit, weight in self._copies().items()}
        if self.session.age + 1 >= self.session.trace_steps:
            self._judge()

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self._judge()

    def _judge(self) -> None:
        for site, fact in list(self._outside.items()):
            if len(fact.steps) >= _ENOUGH:
                del self._outside[site]
                self._say(site, fact)
        if not self._judged and self._first:
            self._judged = True
            self._say_copies()

    def _say(self, site: Site | None, fact: Outside) -> None:
        bounded = fact.bounded
        self.report(
            20,
            Severity.WARNING,
            f"{fact.share:.0%} of the targets lie where {bounded.name} cannot reach.",
            why=f"Its values lie between {bounded.low:g} and {bounded.high:g}, the targets at "
            f"{fact.at} between {fact.least:.3g} and {fact.greatest:.3g}: the units behind it are "
            "driven to the end of its range, where its slope vanishes.",
            fix="Let the last layer give plain numbers, or bring the targets into the range.",
            site=site,
            parameters=fact.live,
            related=(fact.at,),
        )

    def _say_copies(self) -> None:
        registry = self.session.registry
        still = self._copies()
        moved = {b: w for b, w in still.items() if self._first.get(b, checksum(w)) != checksum(w)}
        moved = {b: w for b, w in moved.items() if b & registry.owned & self._weights}
        if not moved:
            return
        weight = next(iter(moved.values()))
        made = registry.zeroed_at.get(weight) or registry.initialised_at.get(weight)
        self.report(
            20,
            Severity.WARNING,
            f"All units of {registry.name(weight)} are copies of one.",
            why="Its rows began equal, so their gradients are equal, and after "
            f"{self.session.age + 1} steps they still are. What would tell them apart has a "
            "gradient of exactly 0: the layer is as wide as a single unit.",
            fix="Start the weights with random numbers; constants are for biases and norms.",
            site=made or birth_site(registry, weight),
            parameters=sum(moved),
        )
