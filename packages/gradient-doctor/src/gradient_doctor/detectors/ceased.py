"""Gradients that come at first and then no more (2, 3, 11; as a note 5).

A cut may begin after the traced steps: a detach behind an `if`, a second phase. At the looks that
follow, a parameter that had a gradient in each step of its optimizer has none. Then the next steps
are traced, and the cut is the one that was not there while gradients still came. Without such a cut
a loss has ended, as auxiliary losses do: that is a note.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gradient_doctor.detectors.late import Claim
from gradient_doctor.explain import CutFact, fact_of, how_to_mend, what_cuts
from gradient_doctor.findings import Severity
from gradient_doctor.session import Backward, Detector, Event, Session, StepRecord
from gradient_doctor.steps import StepFacts

_STEADY = 3  # steps with a gradient, all of them, before a missing one means something
_TRACED = 2  # steps to look closer at
_ENOUGH = 4  # steps without
_LONG = 20  # from the first of them to the last: shorter ones may be turns


@dataclass
class Absence:
    """One parameter without gradient, in all looks since `first`."""

    last: int  # the last step that was looked at and had one
    first: int
    steps: int = 0


class Ceased(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._had: dict[int, int] = {}  # by bit: steps with a gradient
        self._last: dict[int, int] = {}
        self._absent: dict[int, Absence] = {}
        self._turns = 0  # come and go
        self._said = 0
        self._cuts: dict[Any, int] = {}  # of this step, also where another way was open
        self._harmless: dict[Any, int] = {}  # by cut: those that had gradients in spite of it

    def backward_starts(self, backward: Backward) -> None:
        for cut in backward.taint.cuts if backward.taint is not None else ():
            key = fact_of(cut).key
            self._cuts[key] = self._cuts.get(key, 0) | cut.depends

    def event(self, event: Event) -> None:
        facts = event.data.get("update") if event.kind == "step" else None
        if facts is not None:
            present, absent = self._sorted(facts)
            self._came(present)
            self._stayed_away(absent)

    def _sorted(self, facts: StepFacts) -> tuple[set[int], set[int]]:
        """Parameters of an optimizer's step with and without a gradient."""
        bit_of = self.session.registry.bit
        received = self.session.ledger.by_hand
        for backward in self.session.record.backwards:
            received |= backward.received
        empty = [p for p in facts.without_gradient if p.requires_grad]
        empty += [u.parameter for u in facts.updates if u.gradient_norm == 0.0]
        absent = {bit_of(p) for p in empty}
        present = {bit for bit in absent if bit & received}
        present |= {bit_of(u.parameter) for u in facts.updates} - absent
        return present, absent - present

    def _came(self, bits: set[int]) -> None:
        for bit in bits:
            self._had[bit] = self._had.get(bit, 0) + 1
            self._last[bit] = self.session.step
            if self._absent.pop(bit, None) is not None:
                self._turns |= bit
        mask = sum(bits)
        for key, hidden in self._cuts.items():
            self._harmless[key] = self._harmless.get(key, 0) | hidden & mask

    def _stayed_away(self, bits: set[int]) -> None:
        step = self.session.step
        for bit in bits:
            if bit & (self._turns | self._said) or bit not in self._had:
                continue
            if self._had[bit] < _STEADY:
                self._turns |= bit
                continue
            absence = self._absent.setdefault(bit, Absence(self._last[bit], step))
            absence.steps += 1
            if absence.steps <= _TRACED:
                self.session.look_again = True

    def step_ended(self, record: StepRecord) -> None:
        self._cuts.clear()
        if record.checked and self._absent:
            self._judge(at_end=False)

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self._judge(at_end=True)

    def _judge(self, at_end: bool) -> None:
        explained = self.session.ledger.explained
        step = self.session.step
        groups: dict[tuple[int, int], int] = {}  # by the last step with, and the first without
        for bit, absence in self._absent.items():
            long = absence.steps >= _ENOUGH and step - absence.first >= _LONG
            if (long or (at_end and absence.steps > _TRACED)) and not bit & explained:
                when = (absence.last, absence.first)
                groups[when] = groups.get(when, 0) | bit
        for when, mask in groups.items():
            self._said |= mask
            for fact, hidden in self.session.ledger.culprits(mask, self._fresh_cuts(mask)):
                self._cut(fact, hidden, when)
                mask &= ~hidden
            if mask:
                self._ended(mask, when)
        self._absent = {b: a for b, a in self._absent.items() if not b & self._said}

    def _fresh_cuts(self, mask: int) -> list[CutFact]:
        """Cuts as the ledger has them, for those parameters alone that they are new to."""
        facts = self.session.ledger.cuts.items()
        new = {key: fact.mask & mask & ~self._harmless.get(key, 0) for key, fact in facts}
        return [replace(fact, mask=new[key]) for key, fact in facts if new[key]]

    def _cut(self, fact: CutFact, mask: int, when: tuple[int, int]) -> None:
        finding = self.report(
            fact.number,
            Severity.WARNING,
            self._what(mask, when),
            why=f"Steps between two looks are not seen. The loss still depends on them, but now "
            f"{what_cuts(fact)}.",
            fix=f"{how_to_mend(fact)} If they are to rest from there on, freeze them.",
            site=fact.site,
            parameters=mask,
        )
        self._claim(finding, mask)

    def _ended(self, mask: int, when: tuple[int, int]) -> None:
        finding = self.report(
            5,
            Severity.NOTE,
            self._what(mask, when),
            why="Their optimizer still steps. No new cut was seen on the way to a loss: the loss "
            "that reached them has ended, or the steps since were not traced.",
            fix="Nothing to do, if it is meant to end there; freeze them then.",
            parameters=mask,
        )
        self._claim(finding, mask)

    def _what(self, mask: int, when: tuple[int, int]) -> str:
        many = self.session.registry.many(mask)
        return f"{many} received gradients until step {when[0]}, and none from step {when[1]} on."

    def _claim(self, finding: Any, mask: int) -> None:
        self.session.awaited |= mask
        claim = Claim(finding=finding, mask=mask, forget=self._forget)
        self.session.ledger.claims.append(claim)

    def _forget(self, mask: int) -> None:
        self._turns |= mask  # it came back once: not said again
