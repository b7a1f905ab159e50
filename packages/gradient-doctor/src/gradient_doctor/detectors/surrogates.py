"""Classes 24 and 32: the clipped objective of PPO, min(r * A, clip(r) * A) with r = pi / pi_old.

It is to be maximised: without a minus the steps make good actions rare (32). Its ratio compares two
densities of the same action: of an action that is drawn again it is a ratio of nothing (24). And
pi_old is the policy that has drawn the action: where it is computed again after the weights have
moved, the ratio is 1 for ever and the bounds bound nothing (24).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.terms import Term

_KEEPS = {
    *("detach", "sum", "squeeze", "unsqueeze", "view", "reshape", "clone", "float", "flatten"),
    *("mean", "to", "contiguous", "data"),
}
_PARTS = {"__getitem__", "index_select"}
_TAKES = {"gather", "__getitem__", "take_along_dim"}
_BOUNDS = {"clamp", "clip", "clamp_", "clip_"}
_ENOUGH = 2  # steps


@dataclass(frozen=True)
class Density:
    """A log-probability of an action, and at which of our optimizers' steps it was computed."""

    action: int  # id of the tensor; it is kept alive as long as this step lasts
    own: bool  # drawn just now from the distribution that is asked for its density
    site: Site | None
    updates: int


@dataclass(frozen=True)
class Ratio:
    site: Site | None
    old: Site | None
    constant: bool = False  # of a policy to itself, on actions that are older than the last update
    foreign: Site | None = None  # the line of the log-probability of another action
    inverted: bool = False  # pi_old / pi
    bounded: bool = False
    sign: int = 1
    weighted: bool = False


class Surrogates(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._samples = WeakIdKeyDictionary()  # draws -> weak reference to their distribution
        self._densities = WeakIdKeyDictionary()
        self._tables = WeakIdKeyDictionary()  # outputs of log_softmax
        self._differences = WeakIdKeyDictionary()
        self._ratios = WeakIdKeyDictionary()
        self._bases = WeakIdKeyDictionary()  # a part of a batch -> the batch
        self._seen = WeakIdKeyDictionary()  # actions -> updates when a ratio of them came first
        self._updates = 0
        self._objectives: list[tuple[Term, int]] = []  # and the sign that makes them large
        self._bold: list[tuple[Term, bool]] = []  # the other choice of the two; is it the smaller?
        self._steps: dict[tuple[str, Site | None], set[int]] = {}

    def event(self, event: Event) -> None:
        self._updates += event.kind == "step"

    def step_ended(self, record: StepRecord) -> None:
        self._objectives.clear()
        self._bold.clear()

    # log-probabilities

    def sampled(self, distribution: Any, value: Any, pathwise: bool, site: Site | None) -> None:
        if isinstance(value, Tensor):
            self._samples[value] = weakref.ref(distribution)

    def density(self, distribution: Any, value: Any, result: Any, site: Site | None) -> None:
        if isinstance(value, Tensor) and isinstance(result, Tensor):
            drawn = self._samples.get(value)
            own = drawn is not None and drawn() is distribution
            self._add(result, value, own and not value.requires_grad, site)

    def _add(self, result: Tensor, action: Tensor, own: bool, site: Site | None) -> None:
        base = self._base(action)
        known = Density(id(base), own, site, self._updates)
        self._densities[result] = known
        self._seen.setdefault(base, self._updates)

    def _base(self, actions: Tensor) -> Tensor:
        """The batch that these are a part of, or they themselves."""
        ref = self._bases.get(actions)
        base = None if ref is None else ref()
        return actions if base is None else base

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        result, source, short = call.outputs[0], call.inputs[0], call.short
        if short == "log_softmax":
            self._tables[result] = True
        elif short in _TAKES and source in self._tables and len(call.inputs) > 1:
            self._add(result, call.inputs[1], False, call.site)
        elif short in _PARTS and source not in self._densities:
            self._bases[result] = weakref.ref(self._base(source))
        elif short in _KEEPS and source in self._densities:
            self._densities[result] = self._densities[source]
        elif short in _KEEPS and source in self._bases:
            self._bases[result] = self._bases[source]
        elif short == "sub" and len(call.inputs) == 2:
            self._subtract(call)
        elif short == "exp" and source in self._differences:
            self._ratios[result] = self._differences[source]
            self._foreign(self._ratios[result], live_in(self.session, [result]))
        elif self._ratios:
            self._follow(call)

    def _subtract(self, call: OpCall) -> None:
        left, right = call.inputs
        if right.requires_grad and not left.requires_grad and left.shape == right.shape:
            if right in self._densities:
                self._differences[call.outputs[0]] = Ratio(call.site, None, inverted=True)
            return
        new: Density | None = self._densities.get(left)
        if new is None or not left.requires_grad or right.requires_grad:
            return
        old: Density | None = self._densities.get(right)
        other = old is None or old.action != new.action
        values = self.session.values(left), self.session.values(right)
        if values[0] is None or values[1] is None or not values[0].numel():
            return
        first = next((u for a, u in self._seen.items() if id(a) == new.action), self._updates)
        constant = (
            old is not None
            and not other
            and old.updates == self._updates > first
            and torch.equal(values[0], values[1])
        )
        foreign = new.site if new.own and other and left.shape == right.shape else None
        if foreign is not None and torch.equal(values[0], values[1]):
            foreign = None
        self._differences[call.outputs[0]] = Ratio(
            call.site, None if old is None else old.site, constant, foreign
        )

    def _foreign(self, ratio: Ratio, live: int) -> None:
        if ratio.foreign is None or not self._again("foreign", ratio.foreign):
            return
        self.report(
            24,
            Severity.WARNING,
            "The ratio compares log-probabilities of two different actions.",
            why=f"This one is of an action that was drawn just now; at {ratio.site} the stored "
            "log-probability of another action is subtracted from it. The advantage belongs to "
            "the stored action.",
            fix="Evaluate the stored actions: dist.log_prob(actions).",
            site=ratio.foreign,
            parameters=live,
            related=(ratio.site,),
        )

    # the objective

    def _follow(self, call: OpCall) -> None:
        result = call.outputs[0]
        ratios = [self._ratios[t] for t in call.inputs if t in self._ratios]
        if not ratios:
            return
        first = ratios[0]
        numbers = [a for a in call.args if type(a) in (int, float)]
        if call.short in _BOUNDS:
            self._ratios[result] = replace(first, bounded=True)
            self._inverted(first, call)
            self._constant(first, live_in(self.session, [result]))
        elif call.short == "neg":
            self._ratios[result] = replace(first, sign=-first.sign)
        elif call.short == "mul" and len(ratios) == 1:
            others = [t for t in call.inputs if t not in self._ratios]
            if any(t.requires_grad for t in others):
                return
            sign = -first.sign if any(n < 0 for n in numbers) else first.sign
            self._ratios[result] = replace(
                first, sign=sign, weighted=first.weighted or bool(others)
            )
        elif call.short in ("min", "max", "minimum", "maximum") and len(ratios) == 2:
            low = call.short.startswith("min")
            signs = {ratio.sign for ratio in ratios}
            bounded = {ratio.bounded for ratio in ratios}
            if bounded == {True, False} and all(r.weighted for r in ratios) and len(signs) == 1:
                sign = signs.pop()
                if low == (sign > 0):  # the cautious one of the two: made for this direction
                    self._objectives.append((self.session.ledger.terms.of(result), sign))
                else:
                    self._bold.append((self.session.ledger.terms.of(result), low))

    def _inverted(self, ratio: Ratio, call: OpCall) -> None:
        """Its bounds around 1 tell it from an estimate of a divergence."""
        low, high = argument(call, 1, "min"), argument(call, 2, "max")
        numbers = [n for n in (low, high) if isinstance(n, (int, float))]
        if not ratio.inverted or len(numbers) < 2 or not 0 < numbers[0] < 1 < numbers[1]:
            return
        if self._again("inverted", ratio.site):
            self.report(
                24,
                Severity.WARNING,
                "The ratio of the policies is upside down: old / new.",
                why="The stored log-probability is the first of the difference, and the present "
                "one is subtracted from it: a good action raises the objective by becoming rare.",
                fix="ratio = torch.exp(log_prob - old_log_prob).",
                site=ratio.site,
                parameters=live_in(self.session, [call.outputs[0]]),
                related=(call.site,),
            )

    def _constant(self, ratio: Ratio, live: int) -> None:
        if not ratio.constant or not self._again("constant", ratio.old):
            return
        self.report(
            24,
            Severity.WARNING,
            "The old log-probability is computed anew in every update: the ratio is always 1.",
            why="The same actions have been used since before the last step, and the policy that "
            f"drew them is no more; at {ratio.site} the present policy is compared with itself, so "
            "that the bounds of the ratio never apply.",
            fix="Compute the old log-probabilities once, when the actions are drawn, and store "
            "them detached.",
            site=ratio.old,
            parameters=live,
            related=(ratio.site,),
        )

    def _again(self, kind: str, site: Site | None) -> bool:
        steps = self._steps.setdefault((kind, site), set())
        steps.add(self._updates)
        return len(steps) == _ENOUGH

    def backward_starts(self, backward: Backward) -> None:
        if not (self._objectives or self._bold) or backward.taint is None:
            return
        registry = self.session.registry
        if any(g.get("maximize") for o in registry.optimizers.values() for g in o.param_groups):
            return
        whole = {id(term): sign for term, sign in self._objectives}
        bold = {id(term): low for term, low in self._bold}
        for root in backward.roots:
            stack = [(self.session.ledger.terms.of(root), 1.0)]
            seen: set[int] = set()
            while stack:
                term, factor = stack.pop()
                if id(term) in seen:
                    continue
                seen.add(id(term))
                if id(term) in whole:
                    if factor * whole[id(term)] > 0 and self._again("sign", term.site):
                        self._wrong_way(term, backward)
                elif id(term) in bold:
                    if bold[id(term)] == (factor > 0) and self._again("bold", term.site):
                        self._say_bold(term, bold[id(term)], backward)
                elif term.kind == "sum":
                    stack += [(part, factor * w) for part, w in term.parts if part.live]

    def _say_bold(self, term: Term, low: bool, backward: Backward) -> None:
        self.report(
            24,
            Severity.WARNING,
            "The bounds of the ratio bound nothing: the hopeful one of the two is taken.",
            why=f"Of ratio * advantage and its bounded form the {'smaller' if low else 'larger'} "
            "one enters the loss, which is made small: it is the one that promises more, and so "
            "the one without a bound.",
            fix="loss = -torch.min(ratio * advantage, clipped * advantage).mean().",
            site=term.site,
            parameters=term.live,
            related=(backward.site,),
        )

    def _wrong_way(self, term: Term, backward: Backward) -> None:
        self.report(
            32,
            Severity.WARNING,
            "The clipped objective of a policy is minimised.",
            why="The smaller of ratio * advantage and its bounded form is a cautious estimate of "
            "what the policy gains, to be made large. In this loss it has no minus: actions with "
            "an advantage become rare.",
            fix="loss = -torch.min(ratio * advantage, clipped * advantage).mean().",
            site=term.site,
            parameters=term.live,
            related=(backward.site,),
        )
