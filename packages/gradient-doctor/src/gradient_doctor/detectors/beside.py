"""Class 5: an optimizer that steps on a loss which none of its parameters is part of.

A generator's loss is computed from the real sample, an actor's from stored actions. The network may
be part of other losses, where it is rightly detached: those are not the fault.
"""

from __future__ import annotations

from gradient_doctor.detectors.late import Claim
from gradient_doctor.findings import Severity
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Detector, StepRecord


class Beside(Detector):
    """Looks at networks that get no gradient as a whole, and at the loss before their step."""

    def step_ended(self, record: StepRecord) -> None:
        if record.checked and record.backwards:
            self._judge(self.session.ledger.missing(False))

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self._judge(self.session.ledger.missing(True))

    def _judge(self, missing: int) -> None:
        ledger, registry = self.session.ledger, self.session.registry
        if not missing or len(registry.optimizers) < 2:
            return
        for optimizer, site in ledger.aside.items():
            theirs = registry.bits(owned_by(optimizer)) & ledger.should_train()
            if site is None or not theirs or theirs & ~missing:
                continue
            ledger.explained |= theirs
            name = registry.optimizer_name(optimizer)
            finding = self.report(
                5,
                Severity.ERROR,
                f"The loss that {name} steps on depends on none of its parameters.",
                why=f"{registry.many(theirs)} never received a gradient. Right before {name} "
                "steps, backward goes back from the loss that was made here, and no operation of "
                "the traced steps leads from them to it.",
                fix="Compute this loss with what these parameters make (the generated sample, the "
                "action of the present policy), or give the optimizer the parameters that the loss "
                "is for.",
                site=site,
                parameters=theirs,
            )
            if not theirs & ledger.received:
                # a gradient that comes later takes this back
                self.session.awaited |= theirs
                ledger.claims.append(Claim(finding=finding, mask=theirs, forget=self._forget))

    def _forget(self, mask: int) -> None:
        self.session.ledger.explained &= ~mask
