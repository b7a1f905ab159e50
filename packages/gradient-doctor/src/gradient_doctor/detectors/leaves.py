"""Class 7, in loops that move their weights by hand: the gradient is kept by another tensor.

`w = torch.randn(5, requires_grad=True).view(5, 1)` makes a leaf that nobody has a name for, and a
view of it. Gradients are kept by leaves: `w.grad` is None for ever. A tensor that the program
asks for its `.grad` again after another backward is meant to be a weight; what is made anew in
every step is an activation that somebody looks at.

The same beside an optimizer: a tensor that was made before the loop and is used in every step, all
of whose leaves are out of the program's reach. What the program still has a name for may be data.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import shape
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import node_of, origin_of, walk
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.taint import tensors_in

_ENOUGH = 2  # steps
_LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "lstm", "gru", "rnn_tanh", "rnn_relu"}


class Leaves(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._backwards = 0
        # by tensor: how many backwards there were before its `.grad` was first read
        self._first: Any = WeakIdKeyDictionary()
        self._last: tuple[Any, Site | None] | None = None
        self._said: set[Site | None] = set()
        # what layers take: samples that somebody has made with requires_grad
        self._data: Any = WeakIdKeyDictionary()
        self._used: Any = WeakIdKeyDictionary()  # tensors of an earlier step -> steps that use them

    def op(self, call: OpCall) -> None:
        step = self.session.step
        for tensor in call.inputs:
            node = node_of(tensor)
            origin = origin_of(node) if node is not None else None
            if origin is not None and origin.step < step:
                self._used.setdefault(tensor, set()).add(step)
        if call.short in _LAYERS and call.inputs:
            self._data[call.inputs[0]] = True

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, site: Site | None) -> None:
        for tensor in tensors_in([args, kwargs]):
            self._data[tensor] = True

    def step_ended(self, record: StepRecord) -> None:
        if record.traced and self.session.age + 1 >= self.session.trace_steps:
            for tensor, steps in list(self._used.items()):
                if len(steps) >= _ENOUGH and tensor not in self._data:
                    self._look_behind(tensor)
            self._used.clear()

    def _look_behind(self, tensor: Tensor) -> None:
        """Whether nobody but the graph knows the leaves that a lasting tensor was made from."""
        registry = self.session.registry
        leaves = walk(tensor).leaves
        if not leaves or any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            return
        if registry.bits(leaves) & registry.owned or any(leaf.grad is None for leaf in leaves):
            return
        count = len(leaves)
        del leaves
        alone = max(_references(torch.zeros(1, requires_grad=True).view(1)))
        if _references(tensor) == [alone] * count:
            self._say(tensor, None)

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
            Severity.WARNING if read is None else Severity.ERROR,
            f"`.grad` of a tensor {shape(tensor)} that is no leaf is read: it is always None."
            if read is not None
            else f"A tensor {shape(tensor)} that lasts is no leaf, and nothing trains it.",
            why=f"`{op}` at {taint.site} computed it, and gradients are kept by leaves alone: "
            f"{behind} receives them, and nothing updates that.",
            fix="Compute the tensor first, then make it a leaf: "
            "`w = torch.randn(5).view(5, 1).requires_grad_()`.",
            site=taint.site,
            parameters=self.session.registry.bits(leaves),
            related=(read,),
        )


def _references(tensor: Tensor) -> list[int]:
    """How often each leaf behind a tensor is referred to, this look at it included."""
    return [sys.getrefcount(leaf) for leaf in walk(tensor).leaves]
