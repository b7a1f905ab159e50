"""Class 30: gradients that the loss of one optimizer leaves in the network of another.

A generator's loss reaches the discriminator, a policy's the critic. That is harmless while the
other optimizer clears its gradients before its own backward. Here it does not. Either one optimizer
has stepped on a backward, another backward follows that is for the other optimizer alone, and its
step takes both. Or both losses go back before any step: then the loss of one network is known by
being a plain score of the other one (`scores.py`), which has a loss of its own.

A discriminator's loss of real and generated samples has such a score in it, and reaches the
generator where nobody has detached it. That matters only if the generator's step takes it, also
after a loss of the generator's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gradient_doctor.detectors.common import live_in
from gradient_doctor.detectors.places import called
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import node_of
from gradient_doctor.readable import gradient_of
from gradient_doctor.registry import owned_by
from gradient_doctor.scores import Addend, addends
from gradient_doctor.session import Backward, Detector, Event, Session, StepRecord
from gradient_doctor.sites import user_lines
from gradient_doctor.taint import tensors_in

_ENOUGH = 2  # steps


@dataclass
class Pass:
    """One backward, and what is still in `.grad` of it."""

    site: Site | None
    received: int
    left: int
    taken: int = 0  # parameters of optimizers that have stepped on it
    owner: str = ""  # the first of these optimizers
    addends: tuple[Addend, ...] = ()
    caller: Site | None = None


@dataclass
class Leftover:
    """One backward's gradients in another optimizer's steps."""

    mask: int = 0
    steps: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Shared:
    """A loss of one optimizer's network with a score in it that reaches another's."""

    done: Pass
    name: str  # the optimizer whose loss it is, and what it took
    left: int
    owner: str  # the other optimizer, and its parameters
    meant_for: int
    step: Site | None


def _is_helper(done: Pass, own: Pass) -> bool:
    """Whether one line goes back for both, called from two places."""
    return done.site == own.site and done.caller != own.caller


def _is_contest(done: Pass, made_by: int) -> bool:
    """Whether a network judges data on their own here, and beside them what the other has made."""
    own = [a for a in done.addends if a.leaves & done.taken and not a.leaves & made_by]
    return bool(own) and any(a.leaves & done.taken and a.leaves & made_by for a in done.addends)


class Leftovers(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._passes: list[Pass] = []
        self._leftovers: dict[tuple[Site | None, str], Leftover] = {}
        self._addends: tuple[Addend, ...] = ()  # of the backward that is running
        self._shared: list[Shared] = []
        # of this step: where a model was called, what its inputs can train, and what it has itself
        self._entries: list[tuple[Site | None, int, int]] = []

    def module_starts(self, module: Any, args: Any, kwargs: Any, site: Site | None) -> None:
        live = live_in(self.session, tensors_in([args, kwargs]))
        if live:
            own = self.session.registry.bits(module.parameters())
            self._entries.append((site, live, own))

    def backward_starts(self, backward: Backward) -> None:
        """What is None or zero by now was cleared, in whichever way."""
        registry = self.session.registry
        self._addends = ()
        if backward.graph is not None and len(registry.optimizers) > 1:
            nodes = [node for node in map(node_of, backward.roots) if node is not None]
            self._addends = tuple(a for node in nodes for a in addends(node, registry))
        left = 0
        for done in self._passes:
            left |= done.left
        for parameter in registry.tensors(left):
            gradient = gradient_of(parameter)
            values = None if gradient is None else self.session.values(gradient)
            if values is None or not bool(values.any()):
                self._clear(registry.bit(parameter))

    def backward_ended(self, backward: Backward) -> None:
        if backward.kind == "backward" and self.session.record.traced and backward.received:
            received = backward.received
            callers = user_lines()[1:2]
            self._passes.append(
                Pass(
                    backward.site,
                    received,
                    received,
                    addends=self._addends,
                    caller=callers[0] if callers else None,
                )
            )

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
            apart = any(not p.received & done.taken for p in own)
            if left and foreign and (apart or (own and _is_contest(done, owned))):
                self._note(done, name, left, own[-1], site)
        self._scores(owned, name, site)
        self._take_shared(owned, name, site)
        for done in self._passes:
            if done.received & owned:
                done.taken |= owned & done.received
                done.owner = done.owner or name
                done.left &= ~owned

    def _scores(self, owned: int, name: str, site: Site | None) -> None:
        """A plain score of this optimizer's network, meant for another's, is in its gradient."""
        registry = self.session.registry
        others = registry.owned & ~owned
        held = [(p, a) for p in self._passes if p.left & owned for a in p.addends]
        own = [p for p, a in held if a.leaves & owned and not a.leaves & others]
        for done, addend in held:
            meant_for = addend.leaves & others
            if not (own and meant_for and addend.scored & owned and not addend.scored & others):
                continue
            theirs = [
                other
                for other, optimizer in registry.optimizers.items()
                if registry.bits(owned_by(optimizer)) & meant_for
            ]
            if own[-1] is done and not done.taken & meant_for:
                # whose loss it is shows when the other one steps
                left = done.left & owned
                self._shared.append(Shared(done, name, left, theirs[0], meant_for, site))
                continue
            self._note(replace(done, owner=theirs[0]), name, done.left & owned, own[-1], site)

    def _take_shared(self, owned: int, name: str, site: Site | None) -> None:
        for shared in [s for s in self._shared if s.owner == name]:
            self._shared.remove(shared)
            done, mine = shared.done, shared.meant_for & owned
            if not done.left & mine:
                continue
            later = self._passes[self._passes.index(done) + 1 :] if done in self._passes else []
            own = [p for p in later if p.left & mine]
            if own:
                self._note(replace(done, owner=shared.name), name, done.left & mine, own[-1], site)
            else:
                meant = replace(done, owner=shared.owner)
                self._note(meant, shared.name, shared.left, done, shared.step)

    def _entry(self, into: int, of: int) -> Site | None:
        """The call that gave one network what another one has made, with its graph."""
        found = (site for site, live, own in self._entries if live & of and own & into)
        return next(found, None)

    def _note(self, done: Pass, name: str, left: int, own: Pass, step: Site | None) -> None:
        leftover = self._leftovers.setdefault((done.site, name), Leftover())
        leftover.mask |= left
        leftover.steps.add(self.session.step)
        other = self.session.registry.optimizers.get(done.owner)
        theirs = 0 if other is None else self.session.registry.bits(owned_by(other))
        undetached = self._entry(theirs, left) if not own.received & ~done.received else None
        if len(leftover.steps) < _ENOUGH:
            return
        self.report(
            30,
            Severity.WARNING,
            f"The loss of {done.owner} also trains {self.session.registry.many(leftover.mask)} "
            f"of the {called(name)}.",
            why=f"This backward is the one that {done.owner} steps on. It leaves gradients in the "
            f"parameters of {name}, nothing keeps them apart from those of the backward at "
            f"{own.site}, and {name} steps on the sum of both.",
            fix=f"Call {name}.zero_grad() right before its own backward, and step it before the "
            "other loss goes back; or keep this loss away with detach() or "
            "requires_grad_(False).",
            # one line of a helper goes back for both: its caller says for whom
            site=undetached or (done.caller if _is_helper(done, own) else None) or done.site,
            parameters=leftover.mask,
            related=(done.site, own.site, step),
        )

    def step_ended(self, record: StepRecord) -> None:
        self._shared.clear()
        self._entries.clear()
        self._passes = [p for p in self._passes if p.left][-8:] if record.traced else []
