"""What was said too early: parameters that a loss reaches only after the traced steps.

Layers are thawed one after the other, and losses join after a warm-up. So what was said of a
parameter without gradient (classes 2, 3, 4, 5, 11) is taken back by the first gradient that
reaches it, also between two looks; a note of it stays. The detector that has said it looks again,
and speaks of those that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradient_doctor.detectors.places import count
from gradient_doctor.findings import Finding, Severity
from gradient_doctor.session import Backward, Detector, Event, Session, StepRecord

_LOOKS_AT_LESS = 2  # networks that are frozen in turns do so all the time


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One finding about parameters that no gradient has reached yet."""

    finding: Finding
    mask: int
    forget: Callable[[int], None]  # lets the detector speak of these parameters again


class Late(Detector):
    """Takes claims back, and asks for a closer look when more, or less, want gradients."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._most: int | None = None  # owned parameters that wanted gradient at one time
        self._last = 0  # the same, after the last step
        self._looks_at_less = _LOOKS_AT_LESS

    def backward_ended(self, backward: Backward) -> None:
        self._reached(backward.received | backward.arrived)

    def event(self, event: Event) -> None:
        if event.kind == "step_starts" and self.session.awaited & self.session.ledger.by_hand:
            self._reached(self.session.ledger.by_hand)

    def _reached(self, reached: int) -> None:
        session = self.session
        session.awaited &= ~reached
        claims = session.ledger.claims
        if not any(claim.mask & reached for claim in claims):
            return
        for key in dict.fromkeys(c.finding.key for c in claims if c.mask & reached):
            self._take_back([c for c in claims if c.finding.key == key], reached)
        claims[:] = [c for c in claims if not c.mask & reached]

    def _take_back(self, claims: list[Claim], reached: int) -> None:
        session = self.session
        mask = 0
        for claim in claims:
            mask |= claim.mask
        finding = session.found(claims[0].finding.key)
        if finding is None or {*finding.parameters} - {*session.registry.names(mask)}:
            return  # others have said the same of parameters that they know better
        session.withdraw(finding)
        for claim in claims:
            claim.forget(claim.mask)
        reached_count = (mask & reached).bit_count()
        self.report(
            finding.number,
            Severity.NOTE,
            f"{count(reached_count, 'parameter')} had no gradient before step {session.step}, "
            f"and {'has' if reached_count == 1 else 'have'} one since.",
            why=f"Reported before: {finding.what} A later backward reaches "
            f"{'it' if reached_count == 1 else 'them'}.",
            fix="Nothing to do, if it is meant to join that late.",
            parameters=mask & reached,
            related=(finding.site,),
        )

    def step_ended(self, record: StepRecord) -> None:
        """What is thawed, frozen, or added to an optimizer between two looks was not looked at."""
        wanting = sum(
            parameter.requires_grad
            for optimizer in self.session.registry.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        if self._most is not None and wanting > self._most:
            self.session.look_again = True
        elif wanting < self._last and self._looks_at_less:
            self._looks_at_less -= 1
            self.session.look_again = True
        self._last = wanting
        self._most = max(wanting, self._most or 0)
