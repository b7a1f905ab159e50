"""Class 22: gradients are clipped before backward has made them, so the step is as long as ever."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import gradient_of
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, Session, StepRecord

_ENOUGH = 2  # steps


@dataclass
class Early:
    """A clip of this step that met no gradient."""

    site: Site | None
    bits: int
    filled: int = 0  # of these, the parameters that have got a gradient since
    backward: Site | None = None


class Clipping(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._early: list[Early] = []
        self._steps: dict[Site | None, set[int]] = {}
        self._in_time = 0  # parameters whose gradients some clip has met

    def event(self, event: Event) -> None:
        if event.kind == "clip" and not math.isinf(float(event.data["max_norm"])):
            parameters = event.data["parameters"]
            bits = self.session.registry.bits(parameters)
            if any(map(self._has_gradient, parameters)):
                self._in_time |= bits
                self._early = [e for e in self._early if not e.bits & bits]
            else:
                self._early.append(Early(event.site, bits))
        elif event.kind == "step_starts" and self._early:
            owned = self.session.registry.bits(owned_by(event.data["optimizer"]))
            for early in self._early:
                if early.filled & owned & ~self._in_time:
                    self._count(early, early.filled & owned)

    def _has_gradient(self, parameter: Tensor) -> bool:
        gradient = gradient_of(parameter)
        values = None if gradient is None else self.session.values(gradient)
        return values is not None and bool(values.any())

    def backward_ended(self, backward: Backward) -> None:
        for early in self._early if backward.kind == "backward" else ():
            early.filled |= early.bits & backward.received
            early.backward = backward.site

    def step_ended(self, record: StepRecord) -> None:
        self._early.clear()

    def _count(self, early: Early, bits: int) -> None:
        steps = self._steps.setdefault(early.site, set())
        steps.add(self.session.step)
        if len(steps) < _ENOUGH:
            return
        self.report(
            22,
            Severity.WARNING,
            "Gradients are clipped before backward has made them: nothing is clipped.",
            why="At this line no parameter has a gradient. The backward that follows at "
            f"{early.backward} makes them, and the step uses them at any size.",
            fix="Call it between backward() and step().",
            site=early.site,
            parameters=bits,
            related=(early.backward,),
        )
