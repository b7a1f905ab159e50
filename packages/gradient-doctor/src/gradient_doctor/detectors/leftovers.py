"""Class 30: gradients that the loss of one optimizer leaves in the network of another.

A generator's loss reaches the discriminator, a policy's the critic. That is harmless while the
other optimizer clears its gradients before its own backward. Here it does not: one optimizer has
stepped on a backward, another backward follows that is for the other optimizer alone, and its step
takes both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradient_doctor.detectors.places import called, count
from gradient_doctor.findings import Severity, Site
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, Session, StepRecord

_ENOUGH = 2  # steps


@dataclass
class Pass:
    """One backward, and what is still in `.grad` of it."""

    site: Site | None
    received: int
    left: int
    taken: int = 0  # parameters of optimizers that have stepped on it
    owner: str = ""  # the first of these optimizers


@dataclass
class Leftover:
    """One backward's gradients in another optimizer's steps."""

    mask: int = 0
    steps: set[int] = field(default_factory=set)


class Leftovers(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._passes: list[Pass] = []
        self._leftovers: dict[tuple[Site | None, str], Leftover] = {}

    def backward_starts(self, backward: Backward) -> None:
        """What is None or zero by now was cleared, in whichever way."""
        registry = self.session.registry
        left = 0
        for done in self._passes:
            left |= done.left
        for parameter in registry.tensors(left):
            values = None if parameter.grad is None else self.session.values(parameter.grad)
            if values is None or not bool(values.any()):
                self._clear(registry.bit(parameter))

    def backward_ended(self, backward: Backward) -> None:
        if backward.kind == "backward" and self.session.record.traced and backward.received:
            self._passes.append(Pass(backward.site, backward.received, backward.received))

    def event(self, event: Event) -> None:
        registry = self.session.registry
        if not self._passes:
            return
        if event.kind == "zero_grad":
            self._clear(registry.bits(event.data["parameters"]))
        elif event.kind == "grad_set":
            self._clear(registry.bit(event.data["parameter"]))
        elif event.kind == "step":
            self._stepped(event.data["optimizer"], event.site)

    def _clear(self, mask: int) -> None:
        for done in self._passes:
            done.left &= ~mask

    def _stepped(self, optimizer: Any, site: Site | None) -> None:
        registry = self.session.registry
        owned = registry.bits(owned_by(optimizer))
        name = registry.optimizer_name(optimizer)
        for place, done in enumerate(self._passes):
            left = done.left & owned & ~done.taken
            # its own backward came later, and does not reach those that this one was for
            own = [p for p in self._passes[place + 1 :] if p.left & owned]
            foreign = done.owner and not done.taken & owned
            if left and foreign and any(not p.received & done.taken for p in own):
                self._note(done, name, left, own[-1], site)
        for done in self._passes:
            if done.received & owned:
                done.taken |= owned & done.received
                done.owner = done.owner or name
                done.left &= ~owned

    def _note(self, done: Pass, name: str, left: int, own: Pass, step: Site | None) -> None:
        leftover = self._leftovers.setdefault((done.site, name), Leftover())
        leftover.mask |= left
        leftover.steps.add(self.session.step)
        if len(leftover.steps) < _ENOUGH:
            return
        self.report(
            30,
            Severity.WARNING,
            f"The loss of {done.owner} also trains {count(leftover.mask.bit_count(), 'parameter')} "
            f"of the {called(name)}.",
            why=f"This backward is the one that {done.owner} steps on. It leaves gradients in the "
            f"parameters of {name}, nothing clears them before the backward at {own.site}, and "
            f"{name} steps on the sum of both.",
            fix=f"Call {name}.zero_grad() right before its own backward; or keep this loss away "
            "with detach() or requires_grad_(False).",
            site=done.site,
            parameters=leftover.mask,
            related=(own.site, step),
        )

    def step_ended(self, record: StepRecord) -> None:
        self._passes = [p for p in self._passes if p.left][-8:] if record.traced else []
