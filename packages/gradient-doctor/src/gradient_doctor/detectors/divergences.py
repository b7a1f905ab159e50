"""Class 32: a Kullback-Leibler term that is made large instead of small.

The term holds exp(a) - a, or a - log(a): convex in a, least where both distributions agree. With a
minus before it nothing bounds it from below, and the loss falls for ever. No loss needs that: so it
is known by its two halves, which enter with the signs of a maximum.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.terms import Term

_ENOUGH = 2  # steps


class Half(NamedTuple):
    """A part of a loss: its factor, and the sums above it, the whole loss first."""

    factor: float
    path: tuple[Turn, ...]


class Turn(NamedTuple):
    """A sum on the way down, and the factor of what is below it."""

    term: int
    factor: float
    site: Site | None


class Divergences(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._pairs: list[tuple[Term, Term]] = []  # of this step: what grows faster, and slower
        self._steps: dict[Site | None, set[int]] = {}

    def op(self, call: OpCall) -> None:
        if call.short not in ("exp", "exp_", "log") or not call.outputs or not call.inputs:
            return
        source, result = call.inputs[0], call.outputs[0]
        if isinstance(result, Tensor) and result.requires_grad and source is not result:
            of = self.session.ledger.terms.of
            pair = (of(source), of(result))
            self._pairs.append(pair if call.short == "log" else pair[::-1])

    def step_ended(self, record: StepRecord) -> None:
        self._pairs.clear()

    def backward_starts(self, backward: Backward) -> None:
        registry = self.session.registry
        if not self._pairs or backward.taint is None or backward.kind != "backward":
            return
        if len(registry.optimizers) != 1 or backward.taint.live & ~registry.owned:
            return  # an adversary may mean it
        optimizer = next(iter(registry.optimizers.values()))
        if any(group.get("maximize") for group in optimizer.param_groups):
            return
        ends = {id(term) for pair in self._pairs for term in pair}
        for root in backward.roots:
            halves = _halves(self.session.ledger.terms.of(root), ends)
            for fast, slow in self._pairs:
                high, low = halves.get(id(fast)), halves.get(id(slow))
                if high is not None and low is not None and high.factor < 0 < low.factor:
                    known = fast if fast.op in ("exp", "log") else slow
                    self._count(_turned(high, low) or known.site, known, backward)

    def _count(self, site: Site | None, term: Term, backward: Backward) -> None:
        steps = self._steps.setdefault(site, set())
        steps.add(backward.step)
        if len(steps) != _ENOUGH:
            return
        halves = "a - exp(a)" if term.op == "exp" else "log(a) - a"
        self.report(
            32,
            Severity.WARNING,
            "The loss makes a divergence large: minimising it has no end.",
            why=f"It holds {halves}, with the values at {term.site}. A Kullback-Leibler divergence "
            "is its negative; with this sign the distribution is driven away from its prior.",
            fix="Turn the sign: for a Gaussian -0.5 * sum(1 + logvar - mu^2 - exp(logvar)) is "
            "added to the loss.",
            site=site,
            parameters=term.live,
            related=(term.site, backward.site),
        )


def _turned(high: Half, low: Half) -> Site | None:
    """The outermost line above both halves that turns their sign, if one does."""
    before = 1.0
    for one, other in zip(high.path, low.path):
        if one.term != other.term or one.factor * other.factor < 0:
            break
        if one.factor * before < 0:
            return one.site
        before = one.factor
    return None


def _halves(root: Term, ends: set[int]) -> dict[int, Half]:
    """The values that a loss is a sum of; `ends` are not taken apart."""
    out: dict[int, Half] = {}
    stack: list[tuple[Term, float, tuple[Turn, ...]]] = [(root, 1.0, ())]
    budget = 4096
    while stack and budget:
        budget -= 1
        term, factor, path = stack.pop()
        if id(term) in ends:
            out[id(term)] = Half(factor, path)
            continue
        scale = term.kind == "scale"
        for part, weight in term.parts if term.kind == "sum" or scale else ():
            if not part.live:
                continue
            if scale and (term.factor is None or (term.factor.amount or 0.0) <= 0):
                continue  # a weight of unknown sign
            below = factor * (1.0 if math.isnan(weight) else weight)
            stack.append((part, below, (*path, Turn(id(term), below, term.site))))
    return out
