"""Moving averages of a network: one that nobody keeps (21), one that a loss trains as well (30).

`tp = tau * p + (1 - tau) * tp` gives a name to a new tensor, and the target network stays what it
was. And a target that follows another network (an average, a copy) should follow it only: where a
loss gives both of them gradients and an optimizer steps on both, it is pulled along by the loss.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.places import count
from gradient_doctor.explain import bits_of
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import address_of
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.sites import calling_frame, user_frame, user_lines

_ENOUGH = 2  # steps
_NETWORK = 2  # parameters: one alone may be tied to another by a copy
_UNHEARD = 40  # calls of one name without gradients: soon they are not told any more
_PRODUCTS = {"mul", "multiply", "__rmul__"}


@dataclass
class Average:
    """One result of tau * p + (1 - tau) * q."""

    ref: weakref.ref[Tensor]
    address: int
    mask: int


@dataclass
class Line:
    """All averages that one line has made and that nothing has taken."""

    mask: int = 0
    steps: set[int] = field(default_factory=set)


class Unkept(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._parts = WeakIdKeyDictionary()  # number * weight -> (bit of the weight, number)
        self._averages: dict[Site, list[Average]] = {}  # of this step
        self._taken: set[Site] = set()  # lines whose averages something has used
        self._dropped: dict[Site, Line] = {}
        self._follows: dict[int, dict[int, set[int]]] = {}  # weight -> what it follows -> steps
        self._onto_itself: dict[Site, int] = {}
        self._onto_itself_said: set[Site] = set()
        self._together: list[int] = []  # what one backward reached
        self._addresses: dict[int, int] = {}  # of the memory behind a parameter -> its bit

    def op(self, call: OpCall) -> None:
        for average in [a for made in self._averages.values() for a in made]:
            if any(average.ref() is t for t in call.inputs):
                self._taken.update(s for s, made in self._averages.items() if average in made)
        for target in call.targets or ([call.args[0]] if call.short == "__set__" else []):
            self._written(target, call)
        if not call.outputs or call.targets:
            return
        numbers = [a for a in call.args if isinstance(a, (int, float))]
        if call.short in _PRODUCTS and numbers and len(call.inputs) == 1:
            bit = self._weight(call.inputs[0])
            if bit:
                self._parts[call.outputs[0]] = (bit, float(numbers[0]))
        elif call.short == "add" and len(call.inputs) == 2:
            parts = [self._parts[t] for t in call.inputs if t in self._parts]
            if len(parts) == 2 and abs(sum(number for _, number in parts) - 1.0) < 1e-6:
                if parts[0][0] == parts[1][0]:
                    self._note_itself(call, parts[0][0])
                else:
                    self._made(call, parts[0][0] | parts[1][0])

    def _weight(self, tensor: Tensor) -> int:
        """The bit of the parameter that this tensor is, or is the data of."""
        if isinstance(tensor, nn.Parameter):
            return self.session.registry.bit(tensor)
        return self._addresses.get(address_of(tensor), 0) if tensor.numel() else 0

    # averages that are dropped

    def _made(self, call: OpCall, mask: int) -> None:
        result = call.outputs[0]
        if call.site is not None and mask & (mask - 1):
            average = Average(weakref.ref(result), address_of(result), mask)
            self._averages.setdefault(call.site, []).append(average)

    def step_ended(self, record: StepRecord) -> None:
        made, taken = self._averages, self._taken
        self._averages, self._taken = {}, set()
        if max(self.session.heard.values(), default=0) > _UNHEARD:
            return  # not every use of them was seen
        kept = {address_of(p) for p in self.session.registry.everything()} if made else set()
        for site, averages in made.items():
            # of all that a loop made, its variable still holds the last
            living = sum(a.ref() is not None for a in averages)
            if site in taken or living > 1 or any(a.address in kept for a in averages):
                continue
            line = self._dropped.setdefault(site, Line())
            line.steps.add(record.number)
            for average in averages:
                line.mask |= average.mask
            if len(line.steps) == _ENOUGH and len(averages) > living:
                self._say_dropped(site, line.mask)

    def _say_dropped(self, site: Site, mask: int) -> None:
        self.report(
            21,
            Severity.WARNING,
            "A moving average of weights is computed here, and nobody keeps it.",
            why="The assignment gives a name to a new tensor; the parameter that had this name "
            "before is not changed. The network that should follow the other one stands still.",
            fix="Write into the parameter: with torch.no_grad(): target.lerp_(online, tau).",
            site=site,
            parameters=mask,
        )

    # networks that follow another one

    def _written(self, target: Any, call: OpCall) -> None:
        bit = self._weight(target) if isinstance(target, Tensor) else 0
        if not bit or len(call.inputs) < 2:
            return
        # `p.data = q` makes both one; inside of load_state_dict it is told as that
        if call.short == "copy_" and calling_frame() is not None:
            self._copied(target, call, bit)
        depends = 0
        for source in call.inputs:
            if source is not target:
                taint = self.session.taint_of(source)
                depends |= 0 if taint is None else taint.depends
        sources = list(bits_of(depends & ~bit))
        if len(sources) == 1:
            steps = self._follows.setdefault(bit, {}).setdefault(sources[0], set())
            steps.add(self.session.step)

    def _copied(self, target: Tensor, call: OpCall, bit: int) -> None:
        """The source is the target's own memory: nothing changes."""
        source = call.inputs[1]
        if address_of(source) == address_of(target) and source.shape == target.shape:
            self._note_itself(call, bit)

    def _note_itself(self, call: OpCall, bit: int) -> None:
        if call.site is None or call.site in self._onto_itself_said:
            return
        mask = self._onto_itself[call.site] = self._onto_itself.get(call.site, 0) | bit
        if mask.bit_count() < _NETWORK:
            return
        self._onto_itself_said.add(call.site)
        callers = user_lines()[1:2] if _has_twins(user_frame()) else ()
        self.report(
            21,
            Severity.WARNING,
            "A network's weights are copied onto themselves.",
            why="Source and target are the same tensors: nothing changes, and what should follow "
            "another network stays as it was made.",
            fix="Pass the network that learns as the source. If both names mean one network, make "
            "the second with copy.deepcopy.",
            site=callers[0] if callers else call.site,
            parameters=mask,
            related=(call.site,),
        )

    def backward_ended(self, backward: Backward) -> None:
        registry = self.session.registry
        if backward.kind == "backward" and self.session.record.traced:
            self._together.append(backward.received & registry.owned)
            self._addresses = {address_of(p): registry.bit(p) for p in registry.everything()}

    def finish(self, error: BaseException | None) -> None:
        followers = 0
        for bit, sources in self._follows.items():
            for source, steps in sources.items():
                mutual = bit in self._follows.get(source, {})
                both = sum(mask & bit != 0 and mask & source != 0 for mask in self._together)
                if not mutual and len(steps) >= _ENOUGH and both >= _ENOUGH:
                    followers |= bit
        if followers.bit_count() >= _NETWORK:
            self._say_trained(followers)

    def _say_trained(self, mask: int) -> None:
        session, registry = self.session, self.session.registry
        networks = [m for root in registry.roots.values() for m in root.modules()]
        site = None
        for network in networks:  # parents first: the largest that follows as a whole
            own = registry.bits(network.parameters())
            if own and not own & ~mask and session.called.get(network) is not None:
                site = session.called[network]
                break
        self.report(
            30,
            Severity.WARNING,
            f"{count(mask.bit_count(), 'parameter')} that should only follow another network "
            "are trained as well.",
            why="The program moves them towards other parameters after the steps; but the loss "
            "gives both gradients, and an optimizer steps on both: what should be a slow target "
            "learns to agree with what it is compared to.",
            fix="Compute the target's output under no_grad, and keep it out of the optimizer "
            "(requires_grad_(False)).",
            site=site,
            parameters=mask,
        )


def _has_twins(frame: FrameType | None) -> bool:
    """Whether a function was given one network under two names."""
    if frame is None:
        return False
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    networks = [v for v in map(frame.f_locals.get, names) if isinstance(v, nn.Module)]
    return len({id(network) for network in networks}) < len(networks)
