"""Class 24: the ratio of a policy to itself is not 1.

Before the first step the policy that learns is the one that has acted: exp(new - old) of a bounded
surrogate is 1 for every action. If it is not, the two log-probabilities are not of the same thing:
one has the correction for a squashed action and the other has not, one is of another action, state
or temperature. The bounds of the ratio then cut most samples off from the start.

Nothing is said where a layer draws noise (dropout), where the old one is not of this network, or
where no more than some of the samples differ: they may be padding.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Detector, Event, OpCall, Session

_APART = 0.05  # of logarithms, at most samples: more than half precision makes
_KEEPS = {
    *("detach", "sum", "squeeze", "unsqueeze", "view", "reshape", "clone", "float", "flatten"),
    *("mean", "to", "data", "__getitem__", "index_select", "stack", "cat", "gather", "contiguous"),
    *("tensor", "as_tensor", "item", "cpu", "flip", "roll", "transpose", "permute"),
}
_NOISE = {"dropout", "dropout2d", "feature_dropout", "alpha_dropout", "batch_norm"}
_BOUNDS = {"clamp", "clip", "clamp_", "clip_"}


class FirstRatios(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._made = WeakIdKeyDictionary()  # what is stored without gradient -> its first line
        self._plain = WeakIdKeyDictionary()  # a log-probability as a distribution gave it
        self._ratios = WeakIdKeyDictionary()  # differences, and exp of them -> both lines
        self._draws = WeakIdKeyDictionary()  # actions, and log-probabilities of them -> which draw
        self._moved = 0  # parameters that an optimizer has stepped on
        # optimizers that have stepped -> their groups of parameters
        self._groups: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._noisy = False
        self._count = itertools.count()

    def event(self, event: Event) -> None:
        if event.kind == "step":
            optimizer = event.data.get("optimizer")
            # not again in every step
            if optimizer is not None and self._groups.get(optimizer) != len(optimizer.param_groups):
                self._groups[optimizer] = len(optimizer.param_groups)
                self._moved |= self.session.registry.bits(owned_by(optimizer))

    def sampled(self, distribution: Any, value: Any, pathwise: bool, site: Site | None) -> None:
        if isinstance(value, Tensor):
            self._draws[value] = next(self._count)

    def density(self, distribution: object, value: object, result: object, site: object) -> None:
        if isinstance(result, Tensor):
            self._plain[result] = True
            if isinstance(value, Tensor) and value in self._draws:
                self._draws[result] = self._draws[value]

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        short, source, result = call.short, call.inputs[0], call.outputs[0]
        if short in _NOISE and argument(call, 2 if short != "batch_norm" else 5, "training", False):
            self._noisy = True
        elif short in _KEEPS:
            known = self._made.get(source)
            if known is not None and not result.requires_grad:
                self._made[result] = known
            for facts in (self._plain, self._draws):
                if source in facts:
                    facts[result] = facts[source]
        elif short == "sub" and len(call.inputs) == 2:
            self._subtract(call)
        elif short == "exp" and source in self._ratios:
            self._ratios[result] = self._ratios[source]
        elif short in _BOUNDS and source in self._ratios:
            low, high = argument(call, 1, "min"), argument(call, 2, "max")
            bounds = [b for b in (low, high) if isinstance(b, (int, float))]
            if len(bounds) == 2 and 0 < bounds[0] < 1 < bounds[1]:
                self._judge(call, *self._ratios[source])
        stored = not result.requires_grad and result.is_floating_point()
        if stored and result not in self._made and call.taint is not None and call.taint.depends:
            self._made[result] = call.site

    def _subtract(self, call: OpCall) -> None:
        """A log-probability with gradient, less a stored one."""
        new, old = call.inputs
        if not new.requires_grad or old.requires_grad or new.shape != old.shape or not new.numel():
            return
        draws = [self._draws[t] for t in (new, old) if t in self._draws]
        if len(set(draws)) > 1:
            return  # two different actions: surrogates.py says so
        taint = self.session.taint_of(old)
        live = live_in(self.session, [new])
        if taint is None or not live or live & ~taint.depends or live & self._moved:
            return
        values = self.session.values(new), self.session.values(old)
        if values[0] is None or values[1] is None:
            return
        apart = float((values[0].detach() - values[1]).abs().float().median())
        made = self._made.get(old) or taint.site
        mine = self.session.taint_of(new)
        ours = None if mine is None else mine.site
        # the one that is as it came lacks what the other has
        lacks = ours if new in self._plain and old not in self._plain else made
        if apart > _APART:
            self._ratios[call.outputs[0]] = (apart, lacks, made, ours)

    def _judge(
        self, call: OpCall, apart: float, site: Site | None, old: Site | None, new: Site | None
    ) -> None:
        if self._noisy:
            return
        self.report(
            24,
            Severity.WARNING,
            "The ratio of the policy to itself is not 1.",
            why="No step has been taken yet: what learns is what has acted. Still the new and the "
            f"old log-probability of an action differ by {apart:.2g} (the median): one of the two "
            "is not that of the action in the state in which it was taken.",
            fix="Compute both by the same function, of the same stored action, with the same "
            "correction for a squashed action.",
            site=site,
            parameters=live_in(self.session, [call.outputs[0]]),
            related=(old, new, call.site),
        )
