"""Number 0: tensors whose numbers cannot be read. What was not looked at is not healthy."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from gradient_doctor.findings import Severity
from gradient_doctor.readable import (
    FAKE,
    FOREIGN,
    FREED,
    FUNCTORCH,
    META,
    NESTED,
    SHARDED,
    THREADS,
    unreadable,
)
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, Session, StepRecord

# what happens, what is not seen because of it, and how to see it
_WORDS = {
    SHARDED: (
        "Parameters are sharded (FSDP2, DTensor): each process holds a part of them.",
        "Forwards take other tensors than the optimizer holds. Whether these parameters get a "
        "gradient, who owns them and whether they change was not looked at.",
        "Examine the same loop in one process without fully_shard.",
    ),
    FREED: (
        "Some tensors have no storage at times: it is freed after use (FSDP, offloading).",
        "Their values were not read.",
        "Examine the same loop in one process without sharding or offloading.",
    ),
    FUNCTORCH: (
        "Functions under torch.func (vmap, grad, jacobian, hessian) have no readable numbers.",
        "Zeros, numbers that are not finite and missing gradients inside of them are not seen; "
        "only what comes out.",
        "To look inside, compute one sample with plain backward.",
    ),
    META: (
        "A backward ran on the meta device.",
        "Tensors there have shapes and no values.",
        "Nothing to do, if it was to count or to plan.",
    ),
    FAKE: (
        "A backward ran on fake tensors.",
        "They have shapes and no values.",
        "Nothing to do, if it was to count or to plan.",
    ),
    NESTED: (
        "Values of nested tensors are not read.",
        "Zeros, lengths and numbers that are not finite inside of them are not seen.",
        "To look inside, run a few steps with padded tensors.",
    ),
    THREADS: (
        "More than one thread trains: only the first that called backward is examined.",
        "What the others train was not looked at.",
        "Examine one of them alone.",
    ),
    FOREIGN: (
        "Some tensors are of a class or layout with rules of its own (quantised, packed).",
        "Their values were not read.",
        "To look inside, run a few steps with plain tensors.",
    ),
}


class Unread(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._told: set[str] = set()
        self._sharded = 0
        self._looked_at: set[int] = set()

    def backward_starts(self, backward: Backward) -> None:
        if not self.session.record.checked:
            return
        self._look_at(self.session.registry.everything())

    def _look_at(self, parameters: Iterable[Tensor]) -> None:
        sharded = [p for p in parameters if unreadable(p) == SHARDED]
        self._sharded |= self.session.registry.bits(sharded)
        if sharded:
            self.session.blind(SHARDED)
            if self.session.ledger is not None:
                # autograd fills other tensors, which are gone when somebody could look
                self.session.ledger.explained |= self._sharded

    def event(self, event: Event) -> None:
        if event.kind != "step_starts":
            return
        held = list(owned_by(event.data["optimizer"]))
        if FUNCTORCH in self.session.unread and self.session.ledger is not None:
            # gradients per sample, say, put together by hand: who made them was out of sight
            with_gradient = [p for p in held if p.grad is not None]
            self.session.ledger.received |= self.session.registry.bits(with_gradient)
        if id(event.data["optimizer"]) not in self._looked_at:
            # also in steps that are not checked: one look at each optimizer
            self._looked_at.add(id(event.data["optimizer"]))
            self._look_at(held)

    def step_ended(self, record: StepRecord) -> None:
        self._say()

    def finish(self, error: BaseException | None) -> None:
        self._say()

    def _say(self) -> None:
        for kind, site in self.session.unread.items():
            if kind in self._told or kind not in _WORDS:
                continue
            self._told.add(kind)
            what, why, fix = _WORDS[kind]
            self.report(
                0,
                Severity.NOTE,
                what,
                why=why,
                fix=fix,
                site=site,
                parameters=self._sharded if kind == SHARDED else (),
            )
