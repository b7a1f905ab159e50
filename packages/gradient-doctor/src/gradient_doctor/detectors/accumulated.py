"""Class 28: a step that uses gradients which an earlier step has used already.

Accumulation adds several backwards and steps once. Here a step lies between: what it has used is
still in `.grad` when the next backward adds to it, and goes into the next step of the same
optimizer. A gradient that anything clears or replaces before that step does not count, so the
gradients that one loss of a GAN leaves in the other network are none.

Without an optimizer a step is seen by its effect: the tensor has other values than when the last
backward ended, and its gradient is still there.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gradient_doctor.detectors.places import birth_site, called, count
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import checksum, gradient_of
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, Session
from gradient_doctor.slips import bare_attribute, calls_of, stands_after_loop
from gradient_doctor.steps import StepFacts, norm_of

_ENOUGH = 2  # steps of one optimizer that used such gradients


@dataclass
class Repeats:
    """Steps of one optimizer that used earlier gradients again."""

    mask: int = 0
    steps: set[int] = field(default_factory=set)
    since: int = 0  # when the first of them was
    said: bool = False


class Accumulated(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._used: dict[int, float] = {}  # by bit: norm of the gradient that a step used
        self._kept = 0  # it was still there when a backward began
        self._added: dict[int, Site | None] = {}  # the last backward that added to it
        self._closed: dict[int, float] = {}  # by bit: norm of the gradient that a closure left
        self._by_hand: dict[int, tuple[float, float]] = {}  # by bit: checksum and gradient's norm
        self._hand_repeats: dict[Site | None, Repeats] = {}
        # by optimizer or module: where and when its gradients were cleared last
        self._cleared: weakref.WeakKeyDictionary[Any, tuple[Site | None, int]]
        self._cleared = weakref.WeakKeyDictionary()
        self._repeats: weakref.WeakKeyDictionary[Any, Repeats] = weakref.WeakKeyDictionary()

    def backward_starts(self, backward: Backward) -> None:
        if self._by_hand and backward.kind == "backward":
            self._look_by_hand(backward)
        if not self.session.record.checked:
            self._forget(~0)
            return
        watched = self._kept
        for bit in self._used:
            watched |= bit
        for parameter in self.session.registry.tensors(watched):
            bit = self.session.registry.bit(parameter)
            kept = gradient_of(parameter)
            values = None if kept is None else self.session.values(kept)
            norm = 0.0 if values is None else norm_of(values)
            if norm == 0.0:
                self._forget(bit)
            elif self._used.pop(bit, None) == norm:
                self._kept |= bit

    def _look_by_hand(self, backward: Backward) -> None:
        registry, session = self.session.registry, self.session
        repeated = 0
        for bit, (value, norm) in self._by_hand.items():
            leaf = next(registry.tensors(bit), None)
            kept = None if leaf is None else gradient_of(leaf)
            gradient = None if kept is None else session.values(kept)
            if leaf is None or gradient is None or norm == 0.0 or norm_of(gradient) != norm:
                continue
            if checksum(leaf) != value:
                repeated |= bit
        self._by_hand.clear()
        if not repeated:
            return
        repeats = self._hand_repeats.setdefault(backward.site, Repeats())
        repeats.mask |= repeated
        repeats.steps.add(backward.number)
        if len(repeats.steps) >= _ENOUGH and not repeats.said:
            repeats.said = True
            self.report(
                28,
                Severity.WARNING,
                "The gradients that the weights were moved along are not cleared.",
                why="When this backward begins, .grad still holds what the last update used, and "
                f"the backward adds to it: {count(len(repeats.steps), 'update')} so far, each "
                "along the sum of all gradients before.",
                fix="Set .grad to None (or zero_() it) after each update.",
                site=backward.site,
                parameters=repeats.mask,
            )

    def _note_by_hand(self, backward: Backward) -> None:
        registry, session = self.session.registry, self.session
        if registry.optimizers or registry.unnamed or not session.record.checked:
            return
        for leaf in registry.tensors(backward.received):
            kept = gradient_of(leaf)
            gradient = None if kept is None else session.values(kept)
            if gradient is not None:
                self._by_hand[registry.bit(leaf)] = (checksum(leaf), norm_of(gradient))

    def backward_ended(self, backward: Backward) -> None:
        if backward.kind == "backward":
            self._note_by_hand(backward)
        if backward.kind != "backward" or not self._kept:
            return
        mask = backward.received & self._kept
        while mask:
            self._added[mask & -mask] = backward.site
            mask &= mask - 1

    def event(self, event: Event) -> None:
        if event.kind == "zero_grad":
            self._cleared[event.data["owner"]] = (event.site, event.order)
        if event.kind == "closure":
            self._note_closure(event.data["optimizer"])
        if not (self._used or self._kept) and event.kind != "step":
            return
        registry = self.session.registry
        if event.kind == "zero_grad":
            self._forget(registry.bits(event.data["parameters"]))
        elif event.kind == "grad_set":
            self._forget(registry.bit(event.data["parameter"]))
        elif event.kind == "step":
            self._stepped(event)

    def _note_closure(self, optimizer: Any) -> None:
        """What a closure has left is what the step uses: before it there was another gradient."""
        self._closed.clear()
        for parameter in owned_by(optimizer) if self.session.record.checked else ():
            gradient = gradient_of(parameter)
            values = None if gradient is None else self.session.values(gradient)
            if values is not None:
                self._closed[self.session.registry.bit(parameter)] = norm_of(values)

    def _stepped(self, event: Event) -> None:
        facts: StepFacts | None = event.data.get("update")
        if facts is None:
            return
        registry, optimizer = self.session.registry, event.data["optimizer"]
        owned = registry.bits(owned_by(optimizer))
        added = owned & self._kept & sum(self._added)
        if added:
            repeats = self._repeats.setdefault(optimizer, Repeats(since=event.order))
            repeats.mask |= added
            repeats.steps.add(event.step)
            if len(repeats.steps) >= _ENOUGH and not repeats.said:
                repeats.said = True
                self._say(optimizer, repeats, added, event.site)
        self._forget(owned)
        for update in facts.updates:
            bit = registry.bit(update.parameter)
            norm = self._closed.get(bit, update.gradient_norm)
            if norm > 0.0:
                self._used[bit] = norm
        self._used |= {bit: norm for bit, norm in self._closed.items() if norm > 0.0}
        self._closed.clear()

    def _forget(self, mask: int) -> None:
        self._kept &= ~mask
        for known in (self._used, self._added):
            for bit in [bit for bit in known if bit & mask]:
                del known[bit]

    def _say(self, optimizer: Any, repeats: Repeats, added: int, step: Site | None) -> None:
        registry = self.session.registry
        name = registry.optimizer_name(optimizer)
        sites = [site for bit, site in self._added.items() if bit & added]
        bare = bare_attribute([site.file for site in sites if site is not None], "zero_grad")
        rarely = None if bare is not None else self._cleared_before(repeats)
        if bare is None and rarely is None and sites and sites[-1] is not None:
            rarely = _cleared_later(sites[-1], name)
        self.report(
            28,
            Severity.WARNING,
            f"The gradients of {self.session.registry.many(repeats.mask)} are not cleared "
            f"between the steps of the {called(name)}.",
            why=f"When the backward begins, their .grad still holds what the last step of {name} "
            f"used, and the backward adds to it: in {count(len(repeats.steps), 'step')} the "
            "optimizer stepped on the sum of old and new gradients.",
            fix=f"Call {name}.zero_grad() before "
            + ("this" if rarely is None else "each")
            + f" backward, or right after {name}.step()"
            + ("." if rarely is None else ": this line runs too rarely, and belongs there."),
            site=bare or rarely or (sites[-1] if sites else step),
            parameters=repeats.mask,
            related=(
                sites[-1] if rarely and sites else None,
                step,
                birth_site(registry, optimizer),
            ),
        )

    def _cleared_before(self, repeats: Repeats) -> Site | None:
        """The line that has cleared these gradients, but in none of the steps that used them again.

        One that runs in between is right: another is missing.
        """
        registry = self.session.registry
        for owner, (site, order) in self._cleared.items():
            theirs = owner.parameters() if isinstance(owner, nn.Module) else owned_by(owner)
            whole = not repeats.mask & ~registry.bits(theirs)
            if site is not None and whole and order < repeats.since:
                return site
        return None


def _cleared_later(backward: Site, optimizer: str) -> Site | None:
    """The line of the same function that clears them at the end of an epoch."""
    lines = calls_of([backward.file], optimizer, "zero_grad")
    return lines[0] if len(lines) == 1 and stands_after_loop(lines[0], backward) else None
