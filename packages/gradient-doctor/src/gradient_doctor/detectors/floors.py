"""Class 20, of one term: a clamp that cuts off every value, as long as anybody looks.

A floor under a term of the loss (free bits under a divergence, a limit for a penalty) passes no
gradient while the term lies below it. In the first steps that may be meant: the term grows, and
comes free. Where it is still cut off in looks far apart, the floor does not fit the scale of what
it is under (a sum that was divided by the number of pixels first), and the term is a constant.

A floor at 0 is another thing: a penalty that is not needed. So is a term that has come half the way
to its bound since the first look: it will be free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from gradient_doctor.detectors.common import live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import values_of
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.terms import Term, paths_down

_CLAMPS = {"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max", "maximum", "minimum"}
_CLAMPS |= {"max", "min"}
_LOOKS = (15, 40, 90, 200, 450)  # steps of the examination
_ON_ITS_WAY = 0.5  # of the first distance to the bound
_LATE = 2  # looks at later steps than the first


@dataclass
class Floor:
    """One clamp's line: what it cut off, and in which steps."""

    low: float
    high: float
    bound: float
    live: int
    first: float = 0.0  # the distance to the bound when it was seen first
    steps: set[int] = field(default_factory=set)

    @property
    def distance(self) -> float:
        """From the bound to the nearest of the values."""
        return min(abs(self.low - self.bound), abs(self.high - self.bound))


class Floors(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._floors: dict[Site, Floor] = {}
        self._free: set[Site] = set()  # some value passed there
        self._terms: dict[int, tuple[Term, Site]] = {}  # of this step; kept, so that ids are theirs
        self._added: set[Site] = (
            set()
        )  # terms of the loss, and no norm that something is divided by

    def op(self, call: OpCall) -> None:
        site, result = call.site, call.outputs[0] if call.outputs else None
        if site is None or result is None or call.short not in _CLAMPS or site in self._free:
            return
        if not (result.requires_grad and call.inputs and call.inputs[0].requires_grad):
            return
        value, out = values_of(call.inputs[0]), values_of(result)
        two = call.short in ("max", "min", "maximum", "minimum") and not _is_bound(call)
        if value is None or out is None or not out.numel() or two:
            return
        if value.shape != out.shape or bool((out == value).any()) or not bool(out.any()):
            self._free.add(site)
            self._floors.pop(site, None)
            return
        bounds = float(value.min()), float(value.max()), float(out.reshape(-1)[0])
        floor = self._floors.setdefault(site, Floor(*bounds, live_in(self.session, [result])))
        floor.low, floor.high, floor.bound = bounds
        floor.first = floor.first or floor.distance
        term = self.session.ledger.terms.of(result)
        self._terms[id(term)] = term, site

    def backward_starts(self, backward: Backward) -> None:
        for root in backward.roots if self._terms and backward.taint is not None else ():
            whole = self.session.ledger.terms.of(root)
            for path in paths_down(whole, set(self._terms)):
                if id(path.term) in self._terms:
                    self._added.add(self._terms[id(path.term)][1])

    def backward_ended(self, backward: Backward) -> None:
        for stop in backward.vanished:
            site = None if stop.origin is None else stop.origin.site
            if site in self._floors and site in self._added:
                self._floors[site].steps.add(backward.step)

    def step_ended(self, record: StepRecord) -> None:
        self._terms.clear()
        if self.session.age + 1 in _LOOKS and any(f.steps for f in self._floors.values()):
            self.session.look_again = True

    def finish(self, error: BaseException | None) -> None:
        begun = self.session.first + self.session.trace_steps
        for site, floor in self._floors.items():
            late = {step for step in floor.steps if step >= begun}
            if len(late) < _LATE or len(floor.steps) == len(late) or error is not None:
                continue
            if floor.distance < _ON_ITS_WAY * floor.first:
                continue
            self.report(
                20,
                Severity.WARNING,
                "A clamp cuts off every value of a term of the loss, early and late in the run.",
                why=f"In steps {min(floor.steps)} to {max(floor.steps)}, in all "
                f"{len(floor.steps)} that were looked at, all of them lay beyond the bound "
                f"{floor.bound:.3g} (the last: {floor.low:.3g} to {floor.high:.3g}). There the "
                "slope is 0: the term is a constant, and trains nothing.",
                fix="Choose the bound for the scale of the values (before or after they are "
                "divided), or clamp a copy that is only reported.",
                site=site,
                parameters=floor.live,
            )


def _is_bound(call: OpCall) -> bool:
    """Whether the second of two values is no part of the model."""
    other = call.args[1] if len(call.args) > 1 else call.kwargs.get("other")
    return isinstance(other, Tensor) and not other.requires_grad
