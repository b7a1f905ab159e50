"""Class 4: parameters that should be frozen, or unfrozen, by a name that none of them has.

`if name.startswith("backbone")` is never true where the part is called `encoder`: nothing raises,
and everything stays as it was. Or the loop freezes all names but one, and these were frozen
before. Said where the names stand in the source and the loop has run.
"""

from __future__ import annotations

import re

from gradient_doctor.findings import Severity, Site
from gradient_doctor.name_tests import Choice, choices
from gradient_doctor.session import Detector, Event, Session

# kinds of parameters that a model may or may not have; a rule for them is for any model
_KINDS = re.compile(
    r"^\W*(bias|(layer|batch|group)?_?norm\d*|bn\d*|ln\d*|gamma|beta|lora\w*)\W*$", re.I
)
_NORMS = re.compile(r"norm|bn", re.I)  # their statistics are often kept on purpose


class FrozenNames(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._asked: dict[Site, set[str]] = {}  # by line: names of all models that it went through

    def event(self, event: Event) -> None:
        if event.kind == "named" and event.site is not None:
            self._asked.setdefault(event.site, set()).update(event.data["names"])

    def finish(self, error: BaseException | None) -> None:
        for site, names in self._asked.items():
            for choice in choices(site) if names else ():
                named = any(choice.fits(name) for name in names)
                if named and choice.negated:
                    self._look_at_spared(site, choice, names)
                elif not named and not all(map(_KINDS.search, choice.texts)):
                    self._say(site, choice, names)

    def _look_at_spared(self, site: Site, choice: Choice, names: set[str]) -> None:
        """`if "adapter" not in name: freeze` leaves the adapters as they are: frozen before."""
        registry = self.session.registry
        if choice.switch or any(map(_NORMS.search, choice.texts)):
            return
        wanted = {name for name in names if choice.fits(name)}
        spared = [
            parameter
            for name, parameter in registry.parameters().items()
            if any(name == own or name.endswith(f".{own}") for own in wanted)
        ]
        bits = registry.bits(spared)
        frozen = [p for p in spared if not p.requires_grad]
        ledger = self.session.ledger
        if not spared or len(frozen) < len(spared) or not bits & ledger.seen:
            return
        if bits & ledger.received or not ledger.received:
            return  # they have had their turn; or nothing trains at all
        before = next((at for at in map(registry.frozen_at.get, frozen) if at is not None), None)
        texts = " or ".join(f"`{text}`" for text in choice.texts[:3])
        self.report(
            4,
            Severity.WARNING,
            f"The parameters called {texts} are spared here, and are frozen all the same.",
            why="The loop freezes all the others, so these are meant to train. It leaves them as "
            "they are, and requires_grad was False already"
            + (f", since {before}." if before is not None else "."),
            fix="Set both: p.requires_grad = <the condition>, before the optimizer is made.",
            site=Site(site.file, choice.line, site.function),
            parameters=bits,
            related=(before,),
        )

    def _say(self, site: Site, choice: Choice, names: set[str]) -> None:
        wanted = " or ".join(f"`{text}`" for text in choice.texts[:3])
        parts = sorted({name.rsplit(".", 1)[0] for name in names})
        shown = ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
        every = "everything" if choice.negated else "nothing"
        self.report(
            4,
            Severity.WARNING,
            f"No parameter is called {wanted}: {every} is {'un' * choice.switch}frozen here.",
            why=f"The loop goes over {len(names)} parameters, of {shown}; the condition is true "
            + (
                "for all of them, also for those that it should leave out."
                if choice.negated
                else "for none of them, and all stay as they are."
            ),
            fix="Print the names of named_parameters() and use theirs.",
            site=Site(site.file, choice.line, site.function),
        )
