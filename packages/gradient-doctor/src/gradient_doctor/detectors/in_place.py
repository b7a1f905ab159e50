"""Class 13: a tensor that the backward needs was changed after the forward."""

from __future__ import annotations

import re
import weakref
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from gradient_doctor.detectors.places import called
from gradient_doctor.findings import Severity, Site
from gradient_doctor.in_place_layers import is_in_place, made_at
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session

_CHANGED = re.compile(
    r"modified by an inplace operation: \[[\w.]+ \[([\d, ]*)\]\]"
    r"(?:, which is output \d+ of ([\w:]+),)? is at version (\d+); expected version (\d+)"
)
_LEAF = re.compile(r"leaf Variable that requires grad is being used in an in-place operation")
_KEPT = 4096


@dataclass
class Write:
    """One operation in place. Views share the version of their base, and so do their writes."""

    op: str
    site: Site | None
    shapes: tuple[tuple[int, ...], ...]
    version: int  # after it
    bits: int
    layer: weakref.ref[nn.Module] | None = None  # of torch's, made with inplace=True


@dataclass
class Stepped:
    """An optimizer's step, which changes its parameters in place."""

    name: str
    site: Site | None
    versions: dict[int, int]  # by bit, before it


class Complaint(NamedTuple):
    """What torch's message says of the tensor."""

    shape: tuple[int, ...]
    node: str
    version: int
    expected: int


class InPlace(Detector):
    """Keeps a log of writes, and finds in it the one that torch's error speaks of."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._writes: deque[Write] = deque(maxlen=_KEPT)
        self._steps: deque[Stepped] = deque(maxlen=8)

    def op(self, call: OpCall) -> None:
        for target in call.targets:
            if target.is_inference():
                continue
            base = target._base
            shapes = (tuple(target.shape), *([tuple(base.shape)] if base is not None else []))
            bits = call.taint.depends if call.taint is not None else 0
            self._writes.append(
                Write(call.short, call.site, shapes, target._version, bits, self._layer())
            )

    def _layer(self) -> weakref.ref[nn.Module] | None:
        stack = self.session.module_stack
        return weakref.ref(stack[-1]) if stack and is_in_place(stack[-1]) else None

    def event(self, event: Event) -> None:
        if event.kind == "step_starts" and self.session.record.traced:
            registry = self.session.registry
            optimizer = event.data["optimizer"]
            versions = {registry.bit(p): p._version for p in owned_by(optimizer)}
            name = registry.optimizer_name(optimizer)
            self._steps.append(Stepped(name, event.site, versions))

    def op_failed(self, call: OpCall, error: BaseException) -> None:
        if _LEAF.search(str(error)):
            self.report(
                13,
                Severity.ERROR,
                f"`{call.short}` changes a parameter in place while gradients are recorded.",
                why="The graph would need both the old and the new value of a leaf, "
                "and autograd refuses that.",
                fix="Change parameters under torch.no_grad(), or compute a new tensor.",
                site=call.site,
                parameters=self.session.registry.bits(
                    t for t in call.inputs[:1] if t.is_leaf and t.requires_grad
                ),
            )

    def backward_failed(self, backward: Backward, error: BaseException) -> None:
        match = _CHANGED.search(str(error))
        if match is None or backward.outdated:
            return  # a cached graph does not fit today's weights: class 14
        shape = tuple(int(n) for n in match[1].split(",") if n.strip())
        complaint = Complaint(shape, match[2] or "", int(match[3]), int(match[4]))
        stepped = self._step_between(backward, complaint)
        if stepped is not None:
            self._say_step(backward, complaint, *stepped)
        else:
            self._say_write(backward, complaint, self._write(complaint))

    def _step_between(
        self, backward: Backward, complaint: Complaint
    ) -> tuple[Stepped, int, int] | None:
        """The step that changed a parameter of this graph after it was saved."""
        if backward.graph is None:
            return None
        registry = self.session.registry
        leaves = registry.bits(backward.graph.leaves)
        for stepped in reversed(self._steps):
            for bit, before in stepped.versions.items():
                for parameter in registry.tensors(bit & leaves):
                    # saved as it is, or transposed for a matrix product
                    same = tuple(parameter.shape) in (complaint.shape, complaint.shape[::-1])
                    if same and before == complaint.expected < parameter._version:
                        changed = sum(b for b in stepped.versions if b & leaves)
                        return stepped, bit, changed
        return None

    def _write(self, complaint: Complaint) -> Write | None:
        """The first write after the tensor was saved; of several that fit, the latest."""
        shapes = (complaint.shape, complaint.shape[::-1])
        for wanted in (complaint.expected + 1, complaint.version):
            for shape in shapes:
                for write in reversed(self._writes):
                    if write.version == wanted and shape in write.shapes:
                        return write
        # the saved tensor may be a view of what was written to: they share the version only
        wanted = complaint.expected + 1
        return next((w for w in reversed(self._writes) if w.version == wanted), None)

    def _say_step(
        self, backward: Backward, complaint: Complaint, stepped: Stepped, bit: int, changed: int
    ) -> None:
        name = self.session.registry.names(bit)[0]
        self.report(
            13,
            Severity.ERROR,
            f"The {called(stepped.name)} steps between the forward and a backward through it.",
            why=f"The graph has saved {name} {list(complaint.shape)} at version "
            f"{complaint.expected}; after this step it is at version {complaint.version}. The "
            f"backward at {backward.site} needs the old value.",
            fix="Call all backwards first and all optimizer steps after them; or run the forward "
            "again after the step.",
            site=stepped.site,
            parameters=changed,
            related=(backward.site,),
        )

    def _say_write(self, backward: Backward, complaint: Complaint, write: Write | None) -> None:
        tensor = f"A tensor of shape {list(complaint.shape)}"
        if complaint.node:
            tensor += f" (made by {complaint.node})"
        by = "by an operation that was not traced" if write is None else f"by `{write.op}`"
        layer = None if write is None or write.layer is None else write.layer()
        made = None if layer is None else made_at(self.session.registry, layer)
        if made is not None:
            by = f"by a {type(layer).__name__} with inplace=True"
        self.report(
            13,
            Severity.ERROR,
            f"{tensor} is changed in place {by} before the backward that needs it.",
            why=f"It was saved for the backward at version {complaint.expected} and is now at "
            f"version {complaint.version}.",
            fix="Write the result to a new tensor (x = x + 1 instead of x += 1, no `_` method, "
            "inplace=False), or clone() before the change.",
            site=made or (backward.site if write is None else write.site),
            parameters=0 if write is None else write.bits,
            related=(None if write is None else write.site, backward.site),
        )
