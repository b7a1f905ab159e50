"""Class 7, in loops that move their weights by hand: the gradient is kept by another tensor.

`w = torch.randn(5, requires_grad=True).view(5, 1)` makes a leaf that nobody has a name for, and a
view of it. Gradients are kept by leaves: `w.grad` is None for ever. A tensor that the program
asks for its `.grad` again after another backward is meant to be a weight; what is made anew in
every step is an activation that somebody looks at.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import shape
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import walk
from gradient_doctor.session import Backward, Detector, Event, Session


class Leaves(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._backwards = 0
        # by tensor: how many backwards there were before its `.grad` was first read
        self._first: Any = WeakIdKeyDictionary()
        self._last: tuple[Any, Site | None] | None = None
        self._said: set[Site | None] = set()

    def backward_ended(self, backward: Backward) -> None:
        self._backwards += 1

    def event(self, event: Event) -> None:
        if event.kind != "no_grad_kept":
            return
        tensor = event.data["tensor"]()
        if tensor is None:
            return
        self._last = (event.data["tensor"], event.site)
        first: int = self._first.setdefault(tensor, self._backwards) or 0
        if 0 < first < self._backwards:
            self._say(tensor, event.site)

    def finish(self, error: BaseException | None) -> None:
        """The None may have ended the program; or the graph before the tensor, which is freed."""
        ends = ("NoneType", "through the graph a second time")
        if any(end in str(error) for end in ends) and self._last is not None:
            tensor = self._last[0]()
            if tensor is not None:
                self._say(tensor, self._last[1])

    def _say(self, tensor: Tensor, read: Site | None) -> None:
        taint = self.session.taints.get(tensor)
        if taint is None or taint.site in self._said:
            return
        self._said.add(taint.site)
        leaves = walk(tensor).leaves
        op = taint.op.rsplit(".", 1)[-1]
        behind = f"the leaf {shape(leaves[0])} behind it" if leaves else "the leaf behind it"
        self.report(
            7,
            Severity.ERROR,
            f"`.grad` of a tensor {shape(tensor)} that is no leaf is read: it is always None.",
            why=f"`{op}` at {taint.site} computed it, and gradients are kept by leaves alone: "
            f"{behind} receives them, and nothing updates that.",
            fix="Compute the tensor first, then make it a leaf: "
            "`w = torch.randn(5).view(5, 1).requires_grad_()`.",
            site=taint.site,
            parameters=self.session.registry.bits(leaves),
            related=(read,),
        )
