"""Class 8: what was frozen goes on moving, because an optimizer still steps on it.

`requires_grad = False` ends new gradients, and nothing else. As long as `.grad` is there (zeros,
which `zero_grad(set_to_none=False)` leaves, or the last one, which nobody clears) the optimizer
moves the weights: by momentum, by Adam's moments, by weight decay, by the old gradient again.

A step counts if no backward has given the parameter a gradient since its optimizer's last step, and
the program has assigned none. Steps between which others were not looked at do not count.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradient_doctor.detectors.places import birth_site, by_site, called, count
from gradient_doctor.findings import Severity, Site
from gradient_doctor.freezing import frozen_line
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, Session, StepRecord
from gradient_doctor.steps import Update

_ENOUGH = 2  # steps
_LOOKS = 3  # that one such step asks for


@dataclass
class Drift:
    """The steps that have moved one frozen parameter."""

    steps: int = 0
    gradient: float = 0.0  # the norm of the last one
    far: float = 0.0  # the norms of these moves together


class FrozenMoves(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._fresh = 0  # received since their optimizer's last step
        # optimizers all of whose backwards since their last step have been looked at
        self._whole: weakref.WeakSet[Any] = weakref.WeakSet()
        self._drifts: dict[int, Drift] = {}
        self._said = self._looks = 0

    def backward_ended(self, backward: Backward) -> None:
        self._fresh |= backward.received | backward.arrived

    def event(self, event: Event) -> None:
        if event.kind == "grad_set":
            self._fresh |= self.session.registry.bit(event.data["parameter"])
        elif event.kind == "step":
            self._stepped(event)

    def step_ended(self, record: StepRecord) -> None:
        if not record.checked:
            self._whole.clear()
            self._fresh = 0

    def _stepped(self, event: Event) -> None:
        optimizer, facts = event.data["optimizer"], event.data.get("update")
        if facts is None:
            return
        registry = self.session.registry
        idle = [u for u in facts.updates if not u.parameter.requires_grad]
        moved = [
            u for u in idle if u.moved_norm > 0 and not registry.bit(u.parameter) & self._fresh
        ]
        if moved and optimizer in self._whole:
            self._count(event, optimizer, moved)
        if moved and self._looks < _LOOKS:
            self._looks += 1
            self.session.look_again = True
        self._fresh &= ~registry.bits(owned_by(optimizer))
        self._whole.add(optimizer)

    def _count(self, event: Event, optimizer: Any, moved: list[Update]) -> None:
        registry = self.session.registry
        ripe: list[Tensor] = []
        for update in moved:
            bit = registry.bit(update.parameter)
            drift = self._drifts.setdefault(bit, Drift())
            # a gradient that has become another one was written by the program, in place
            stays = update.gradient_norm in (0.0, drift.gradient)
            drift.steps = drift.steps + 1 if stays else 1
            drift.gradient = update.gradient_norm
            drift.far += update.moved_norm
            if drift.steps >= _ENOUGH and not bit & self._said:
                self._said |= bit
                ripe.append(update.parameter)

        def where(parameter: Tensor) -> Site | None:
            return frozen_line(registry, parameter, [event.site])

        for site, mask in by_site(registry, ripe, where).items():
            self._say(event, optimizer, site, mask)

    def _say(self, event: Event, optimizer: Any, site: Site | None, mask: int) -> None:
        registry = self.session.registry
        name = called(registry.optimizer_name(optimizer))
        parameters = list(registry.tensors(mask))
        far = max(self._drifts[registry.bit(p)].far for p in parameters)
        old = any(p.grad is not None and bool(p.grad.any()) for p in parameters)
        self.report(
            8,
            Severity.WARNING,
            f"The {name} still moves {count(len(parameters), 'parameter')} with "
            "requires_grad=False.",
            why=f"In {_ENOUGH} steps in a row no backward gave them a gradient, and yet they "
            f"changed (one of them by {far:.2g}). Their .grad is "
            + ("still the last one" if old else "zeros, not None")
            + ": so the optimizer steps on them, by momentum, by weight decay or by that gradient.",
            fix="Set p.grad = None when you freeze p; or make a new optimizer of what still "
            "trains. requires_grad_(False) alone only ends new gradients.",
            site=site or event.site or birth_site(registry, optimizer),
            parameters=mask,
            related=(event.site, birth_site(registry, optimizer)),
        )
