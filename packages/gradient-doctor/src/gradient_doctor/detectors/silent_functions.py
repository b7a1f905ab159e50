"""Class 20: a custom autograd Function whose backward gives None where a gradient should pass.

The graph leads through it, so nothing looks cut; and autograd takes None for zero. Said of what
should train, and has never received a gradient although the graph of every loss reached it.
"""

from __future__ import annotations

from gradient_doctor.findings import Severity, Site
from gradient_doctor.functions import backward_line, function_of
from gradient_doctor.graph import is_opaque, nodes_of
from gradient_doctor.session import Backward, Detector, Session

_ENOUGH = 2  # backwards


class SilentFunctions(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._behind: dict[type, int] = {}  # by kind of Function: what is reached through it alone
        self._backwards = 0

    def backward_ended(self, backward: Backward) -> None:
        if backward.kind != "backward" or backward.graph is None or backward.inputs is not None:
            return
        self._backwards += 1
        registry = self.session.registry
        for node in backward.graph.opaque:
            kind = function_of(node)
            if kind is not None:
                leaves = (getattr(n, "variable", None) for n in nodes_of(node) if not is_opaque(n))
                behind = registry.bits(leaf for leaf in leaves if leaf is not None)
                self._behind[kind] = self._behind.get(kind, 0) | behind

    def finish(self, error: BaseException | None) -> None:
        ledger = self.session.ledger
        if error is not None or self._backwards < _ENOUGH:
            return
        silent = ledger.should_train() & ~ledger.received & ~ledger.explained
        for kind, behind in self._behind.items():
            site = backward_line(kind)
            hit = behind & silent
            if hit and site is not None:
                silent &= ~hit
                self._say(kind, site, hit)

    def _say(self, kind: type, site: Site, mask: int) -> None:
        self.session.ledger.explained |= mask
        self.report(
            20,
            Severity.ERROR,
            f"{kind.__name__}.backward gives no gradient to {self.session.registry.many(mask)}.",
            why="The graph leads to them through this Function alone, and no gradient has ever "
            "arrived: its backward returns None in their place, which autograd takes for zero.",
            fix="Return one gradient for each input of forward, in the same order; None is for "
            "inputs that need none.",
            site=site,
            parameters=mask,
        )
