"""Where what parameters take part in ends: results that nothing takes, and modules without them.

A coupling layer joins its halves into `x_` and returns `x`; a head computes logits, of which only
the argmax is counted. The line that made the last live value of this kind is the one that was
meant to be used.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.findings import Site
from gradient_doctor.session import OpCall, Session
from gradient_doctor.taint import tensors_in


@dataclass(slots=True, eq=False)
class Value:
    """A value that a gradient could pass; `used` when another such value was made of it."""

    site: Site | None
    live: int
    used: bool = False


class DeadEnds:
    """The values of a traced step, and what is left of them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._values: list[Value] = []
        self._by_tensor = WeakIdKeyDictionary()
        self._lines: dict[Site, int] = {}  # lines of values that nothing took, the last one last
        # modules -> what their results depended on
        self._returned: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def made(self, call: OpCall) -> None:
        if call.taint is None or not call.taint.live:
            return
        outputs = [t for t in call.outputs if t.requires_grad]
        if not outputs:
            return
        for tensor in call.inputs:
            known = self._by_tensor.get(tensor)
            if known is not None:
                known.used = True
        value = Value(call.site, call.taint.live)
        self._values.append(value)
        for tensor in outputs:
            self._by_tensor[tensor] = value

    def used(self, root: Tensor) -> None:
        """A backward starts from it."""
        known = self._by_tensor.get(root)
        if known is not None:
            known.used = True

    def returned(self, module: nn.Module, output: Any) -> None:
        depends = self._returned.get(module, 0)
        for tensor in tensors_in(output):
            taint = self.session.taint_of(tensor)
            depends |= 0 if taint is None else taint.depends
        self._returned[module] = depends

    def step_ended(self) -> None:
        for value in self._values:
            if not value.used and value.site is not None:
                mask = self._lines.pop(value.site, 0)
                self._lines[value.site] = mask | value.live
        self._values.clear()
        self._by_tensor.clear()

    def of(self, mask: int) -> Site | None:
        """The line of the last value that most of these parameters took part in, to no effect."""
        best: tuple[int, Site | None] = (0, None)
        for site, live in self._lines.items():
            count = (live & mask).bit_count()
            if count and count >= best[0]:
                best = (count, site)
        return best[1]

    def keeps_to_itself(self, module: nn.Module, own: int) -> bool:
        """Whether a module was called and no result of it depended on its own parameters."""
        return module in self._returned and not self._returned[module] & own
