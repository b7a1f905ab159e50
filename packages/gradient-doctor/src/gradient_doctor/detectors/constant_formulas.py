"""Class 20, up to rounding: a loss that is a constant by its formula.

The parameters behind it have a gradient, of the size of rounding errors, so that nothing looks like
zero; see `cancelled.py`. It is said of parameters that the loss reaches in no other way, after two
traced steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradient_doctor.cancelled import Cancelled, mark_normalised
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import is_opaque, node_of, nodes_of
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord

_ENOUGH = 2  # steps
# attention to values that are all the same, as the first queries of a decoder may be
_WEIGHS = {"linear", "matmul", "mm", "bmm", "addmm", "einsum", "__matmul__", "baddbmm"}


@dataclass
class Constant:
    """What one line makes of a gradient, over the steps."""

    one: Cancelled
    made: Site | None
    mask: int
    steps: set[int] = field(default_factory=set)
    handed_out: bool = False  # by autograd.grad


class ConstantFormulas(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._seen: dict[tuple[Site, str], Constant] = {}
        self._alive = 0  # parameters that some backward gave another gradient

    def op(self, call: OpCall) -> None:
        mark_normalised(call)

    def backward_ended(self, backward: Backward) -> None:
        if not backward.cancelled:
            self._alive |= backward.received if self.session.record.traced else 0
            return
        if backward.kind == "grad":
            self._handed_out(backward)
            return
        constant = 0
        nodes = {one.node for one in backward.cancelled}
        others = self.session.registry.bits(_leaves_around(backward, nodes))
        for one in backward.cancelled:
            use = one.use or one.origin
            if use is None or use.site is None:
                continue
            if one.kind == "softmax" and _short(use.op) in _WEIGHS:
                continue
            # weight and bias of a normalisation come after it
            top = one.node.next_functions[0][0] if one.kind == "norm" else one.node
            hit = self.session.registry.bits(_leaves_of(top)) & ~others
            if hit:
                constant |= hit
                made = one.origin.site if one.origin is not None else None
                seen = self._seen.setdefault((use.site, one.kind), Constant(one, made, hit))
                seen.steps.add(backward.step)
                seen.mask |= hit
        self._alive |= backward.received & ~constant
        for seen in self._seen.values():
            seen.one.node = None  # no graph is kept

    def _handed_out(self, backward: Backward) -> None:
        """A gradient that is asked for itself, as penalties do, and is rounding."""
        nodes = {one.node for one in backward.cancelled}
        wanted = {id(t) if node_of(t) is None else id(node_of(t)) for t in backward.inputs or ()}
        reached = {id(node) for node in _nodes_around(backward, nodes)}
        reached |= {id(leaf) for leaf in _leaves_around(backward, nodes)}
        one = backward.cancelled[0]
        use = one.use or one.origin
        if wanted & reached or use is None or use.site is None or backward.taint is None:
            return
        if one.kind == "softmax" and _short(use.op) in _WEIGHS:
            return
        made = one.origin.site if one.origin is not None else None
        fresh = Constant(one, made, backward.taint.live, handed_out=True)
        seen = self._seen.setdefault((use.site, one.kind), fresh)
        seen.steps.add(backward.step)
        one.node = None

    def step_ended(self, record: StepRecord) -> None:
        for (site, _), seen in list(self._seen.items()):
            if len(seen.steps) >= _ENOUGH:
                self._say(site, seen)
        if record.traced:
            self._seen = {k: s for k, s in self._seen.items() if len(s.steps) < _ENOUGH}

    def _say(self, site: Site, seen: Constant) -> None:
        one, ledger, registry = seen.one, self.session.ledger, self.session.registry
        bits = seen.mask & (registry.owned | registry.registered)
        if not seen.handed_out:
            bits &= ~self._alive & ~ledger.explained
            ledger.explained |= bits
        if not bits:
            return
        made = _short(one.origin.op) if one.origin is not None else "a call"
        what, why, fix = _WORDS[one.kind]
        self.report(
            20,
            Severity.ERROR,
            what.format(made),
            why=f"{why} The gradients that arrive there (up to {one.before:.2g}) cancel, and "
            f"rounding is left ({one.after:.2g}): "
            + (
                "what autograd.grad returns is nothing else."
                if seen.handed_out
                else "the parameters behind it do not learn from it."
            ),
            fix=fix,
            site=site,
            parameters=bits,
            related=(seen.made,),
        )


_WORDS = {
    "softmax": (
        "The loss takes the {} as a sum, which is always 1.",
        "All places of a row get the same gradient, and a softmax passes nothing of that on.",
        "Weigh the places differently: take the logarithm of the one probability that is meant "
        "(log_softmax and gather, or cross_entropy).",
    ),
    "norm": (
        "The loss takes the {} as a mean, which is always the same.",
        "Normalised values have a fixed mean and size, so what is made of these alone is constant.",
        "Put a layer with weights between the normalisation and the mean, or take it away.",
    ),
    "uses": (
        "The gradients of the uses of one value ({}) cancel.",
        "The loss depends on a difference that is the same whatever the value is.",
        "Look at the formula: something is subtracted from itself, or from what it sums to.",
    ),
}


def _short(op: str) -> str:
    return op.rsplit(".", 1)[-1]


def _leaves_of(top: Any) -> Iterator[Tensor]:
    for node in nodes_of(top):
        yield from _leaf(node)


def _leaves_around(backward: Backward, without: set[Any]) -> Iterator[Tensor]:
    """Leaves that the loss reaches on a way past these nodes."""
    for node in _nodes_around(backward, without):
        yield from _leaf(node)


def _nodes_around(backward: Backward, without: set[Any]) -> Iterator[Any]:
    stack = [root.grad_fn for root in backward.roots if root.grad_fn is not None]
    seen = {*without, *stack}
    stack = [node for node in stack if node not in without]
    while stack:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def _leaf(node: Any) -> Iterator[Tensor]:
    leaf = None if is_opaque(node) else getattr(node, "variable", None)
    if isinstance(leaf, torch.Tensor):
        yield leaf
