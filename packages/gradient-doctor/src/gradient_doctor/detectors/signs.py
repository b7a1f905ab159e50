"""Class 32, from how the loss was put together: terms that are minimised where they should grow.

An entropy that is added to a policy's loss is made small: the policy is driven to be sure of itself
too early. A squared or absolute error behind a minus is made large without a bound.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import live_in, maximised
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.taint import Cut
from gradient_doctor.terms import Term, paths_down

_SIZES = {"pow", "__pow__", "square", "abs"}
_ENOUGH = 2  # steps


class Signs(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._gaps = WeakIdKeyDictionary()  # a prediction minus data
        # terms of this step; kept, so that no other takes their ids
        self._entropies: list[Term] = []
        self._errors: list[Term] = []
        self._minus_entropies: list[Term] = []  # p * log(p), by hand
        self._tables = WeakIdKeyDictionary()  # softmax ("p") and its logarithm ("log") -> scores
        self._scored = 0  # parameters that log-probabilities of this step depend on
        self._steps: dict[tuple[str, Site | None], set[int]] = {}

    def entropy(self, distribution: Any, result: Any) -> None:
        if isinstance(result, Tensor) and live_in(self.session, [result]):
            self._entropies.append(self.session.ledger.terms.of(result))

    def density(self, distribution: Any, value: Any, result: Any, site: Site | None) -> None:
        if isinstance(value, Tensor) and not value.requires_grad:
            self._scored |= live_in(self.session, [result])

    def op(self, call: OpCall) -> None:
        self._by_hand(call)
        if call.short in ("sub", "__rsub__") and len(call.inputs) == 2 and call.outputs:
            left, right = call.inputs
            one_sided = left.requires_grad != right.requires_grad and left.shape == right.shape
            data = right if left.requires_grad else left
            taint = self.session.taint_of(data)
            # another network's output is no answer: adversaries and curiosity push away from it
            if one_sided and data.numel() > 1 and (taint is None or not taint.depends):
                self._gaps[call.outputs[0]] = True
        elif call.short in _SIZES and call.inputs and call.inputs[0] in self._gaps:
            self._errors.append(self.session.ledger.terms.of(call.outputs[0]))

    def _by_hand(self, call: OpCall) -> None:
        """`p * log(p)` of the same scores, and log-probabilities of actions that were drawn."""
        if not call.outputs or not call.inputs or not call.outputs[0].requires_grad:
            return
        result, source = call.outputs[0], call.inputs[0]
        kind, scores = self._table(source)
        if call.short in ("softmax", "log_softmax"):
            self._tables[result] = ("p" if call.short == "softmax" else "log", id(source))
        elif call.short == "log" and kind == "p":
            self._tables[result] = ("log", scores)
        elif call.short in ("add", "clamp", "clamp_min", "clip") and kind == "p":
            self._tables[result] = (kind, scores)  # a floor under the logarithm
        elif call.short in ("exp",) and kind == "log":
            self._tables[result] = ("p", scores)
        elif call.short == "mul" and len(call.inputs) == 2:
            known = [self._table(t) for t in call.inputs]
            if {k for k, _ in known} == {"p", "log"} and known[0][1] == known[1][1]:
                self._minus_entropies.append(self.session.ledger.terms.of(result))
        elif call.short in ("gather", "__getitem__") and kind and len(call.inputs) > 1:
            taint = self.session.taint_of(call.inputs[1])
            if taint is not None and any(_is_draw(cut) for cut in taint.cuts):
                self._scored |= live_in(self.session, [result])

    def _table(self, tensor: Tensor) -> tuple[str, int]:
        return self._tables.get(tensor) or ("", 0)

    def step_ended(self, record: StepRecord) -> None:
        self._entropies.clear()
        self._minus_entropies.clear()
        self._errors.clear()
        self._scored = 0

    def backward_starts(self, backward: Backward) -> None:
        if backward.taint is None or backward.kind != "backward":
            return
        negative = {id(term) for term in self._minus_entropies}
        known = (*self._entropies, *self._errors, *self._minus_entropies)
        if not known or maximised(self.session, backward):
            return
        for root in backward.roots:
            whole = {id(term) for term in known}
            root_term = self.session.ledger.terms.of(root)
            for term, factor, site, alone in _parts(root_term, whole):
                if id(term) in negative:
                    if factor < 0 and not alone and self._scored & term.live:
                        self._say("entropy", _joined_at(root_term, term) or site, term, backward)
                    continue
                if any(term is known for known in self._entropies):
                    if factor > 0 and not alone and self._scored & term.live:
                        self._say("entropy", site or term.site, term, backward)
                    continue
                error = any(term is known for known in self._errors)
                if error and factor < 0 and alone and self._is_all(backward):
                    self._say("error", site or term.site, term, backward)

    def _is_all(self, backward: Backward) -> bool:
        """The only loss of the only optimizer: no adversary has a part in it."""
        registry = self.session.registry
        live = backward.taint.live if backward.taint is not None else 0
        lines = {b.site for b in self.session.record.backwards}
        return len(registry.optimizers) == 1 and not live & ~registry.owned and len(lines) == 1

    def _say(self, kind: str, site: Site | None, term: Term, backward: Backward) -> None:
        steps = self._steps.setdefault((kind, site), set())
        steps.add(backward.step)
        if len(steps) != _ENOUGH:
            return
        entropy = kind == "entropy"
        self.report(
            32,
            Severity.WARNING,
            "The policy's entropy is added to its loss: minimising the loss makes it small."
            if entropy
            else "The loss is minus an error, and the steps drive the error up.",
            why="It enters with a positive factor beside a term of log-probabilities. An entropy "
            "bonus keeps a policy from being sure too early; this one hurries it."
            if entropy
            else "Squares and absolute values of (prediction - data) have no upper bound: every "
            "step along this gradient makes the predictions worse.",
            fix="Subtract it: loss - coefficient * entropy." if entropy else "Remove the minus.",
            site=site,
            parameters=term.live,
            related=(term.site, backward.site),
        )


def _joined_at(root: Term, term: Term) -> Site | None:
    """The line of the last sum, on the way from a loss down to a term, with others in it."""
    path = next((p for p in paths_down(root, {id(term)}) if p.term is term), None)
    sums = [] if path is None else [t for t, _ in path.steps if len(t.parts) > 1]
    return sums[-1].site if sums else None


def _is_draw(cut: Cut) -> bool:
    return cut.kind == "sample" or (cut.region is not None and cut.region.kind == "sample")


def _parts(root: Term, whole: set[int]) -> list[tuple[Term, float, Site | None, bool]]:
    """Values that a loss is the sum of: with factor, the line of the last sum, and if there are
    no others that are alive. Those of `whole` are not taken apart."""
    found: list[tuple[Term, float, Site | None, bool]] = []
    stack: list[tuple[Term, float, Site | None, bool]] = [(root, 1.0, None, True)]
    seen: set[int] = set()
    while stack:
        term, factor, site, alone = stack.pop()
        if id(term) in seen:
            continue
        seen.add(id(term))
        alive = [part for part, _ in term.parts if part.live]
        if term.kind != "sum" or not alive or id(term) in whole:
            found.append((term, factor, site, alone))
            continue
        for part, weight in term.parts:
            if part.live:
                product = factor if math.isnan(weight) else factor * weight
                own = term.site if len(term.parts) > 1 or weight < 0 else site
                stack.append((part, product, own, alone and len(alive) == 1))
    return found
