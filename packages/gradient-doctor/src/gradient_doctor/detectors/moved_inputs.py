"""Where an input is moved by its gradient, after a training: attacks, dreams, styles, inversions.

Such a phase has no optimizer whose steps could be told apart, and comes after the traced steps.
This reports nothing itself: it asks for a closer look, in which the others see what they look for.
"""

from __future__ import annotations

from torch import Tensor, nn

from gradient_doctor.findings import Site
from gradient_doctor.graph import walk
from gradient_doctor.session import Backward, Detector, Event, Session

_ENOUGH = 3  # gradients of one new line without an optimizer's step
_LOOKS = 2


class MovedInputs(Detector):
    """Finds the first backwards of a phase that has no optimizer."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._known: set[Site | None] = set()  # lines that have been looked at
        self._counts: dict[Site | None, int] = {}  # since the last optimizer step
        self._looks = 0

    def backward_starts(self, backward: Backward) -> None:
        site = backward.site
        if self.session.record.traced or site in self._known or self._looks >= _LOOKS:
            self._known.add(site)
            return
        if not any(map(self._is_input, _leaves(backward))):
            self._known.add(site)
            return
        self._counts[site] = self._counts.get(site, 0) + 1
        if self._counts[site] >= _ENOUGH:
            self._known.add(site)
            self._looks += 1
            self.session.new_phase = True

    def event(self, event: Event) -> None:
        if event.kind == "step":
            self._counts.clear()

    def _is_input(self, leaf: Tensor) -> bool:
        registry = self.session.registry
        if not leaf.is_leaf or not leaf.requires_grad or isinstance(leaf, nn.Parameter):
            return False
        return not any(registry.owners(leaf))


def _leaves(backward: Backward) -> list[Tensor]:
    """The leaves whose gradients a backward is for, as far as one can tell before it."""
    if backward.kind == "grad":
        # with retain_graph, its result is likely a part of some other loss: a penalty, a residual
        return [] if backward.retain_graph else backward.inputs or []
    return [leaf for root in backward.roots for leaf in walk(root).leaves]
