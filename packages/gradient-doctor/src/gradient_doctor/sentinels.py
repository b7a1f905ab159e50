"""Guards on the nodes of one backward: where does the gradient become zero, where not finite?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradient_doctor.cancelled import Cancellations
from gradient_doctor.graph import MARK, NodeOrigin, is_opaque, origin_of
from gradient_doctor.interruptions import is_the_programs
from gradient_doctor.readable import alone, is_finite, values_of
from gradient_doctor.session import Session

# nodes that may turn a gradient to zero by doing their work: they add up, choose or move
_SELECTORS = (
    "AccumulateGrad",
    "Select",
    "Slice",
    "Index",
    "Gather",
    "Embedding",
    "Split",
    "Unbind",
)


@dataclass(eq=False)
class Vanished:
    """A node that received a gradient and passed on nothing but zeros.

    Where other inputs of the node did get a gradient (`partial`), `edges` says which did not.
    """

    node: Any
    name: str
    origin: NodeOrigin | None
    partial: bool = False
    edges: tuple[int, ...] = ()


@dataclass(eq=False)
class Blown:
    """A node that received finite gradients and passed on others."""

    node: Any
    name: str
    origin: NodeOrigin | None
    kind: str  # "nan" or "inf"
    singular: bool = False  # even a gradient of size one would not pass: no scale helps


@dataclass(eq=False)
class Leak:
    """A node whose result must not count at some places (padding), but has a gradient there."""

    name: str
    origin: NodeOrigin | None
    leaking: int
    places: int
    places_size: int  # of the whole, to find the mask of that size


class Sentinels:
    """Hooks on every node behind a root, for one backward."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.vanished: list[Vanished] = []
        self.partial: list[Vanished] = []
        self.blown: list[Blown] = []
        self.leaks: list[Leak] = []
        self.cancellations = Cancellations()
        self._handles: list[Any] = []
        self._functions: dict[Any, NodeOrigin | None] = {}  # custom Functions, seen from around
        self._behind: dict[Any, list[Any]] = {}  # node -> the custom Functions before it
        self._fed: set[Any] = set()
        self._passed: set[Any] = set()

    def watch(self, root: Tensor) -> None:
        nodes = list(_with_origins(root.grad_fn))
        self.cancellations.expect(nodes)
        for node, origin in nodes:
            # a Python node's hook runs in user code's way (checkpoints replay); leave it alone
            if is_opaque(node):
                self._functions[node] = origin
                for child, _ in node.next_functions:
                    if child is not None:
                        self._behind.setdefault(child, []).append(node)
        for node, origin in nodes:
            if not is_opaque(node):
                self._handles.append(node.register_hook(self._guard(node, origin)))
            else:
                self._passed.update(self._behind.get(node, ()))  # nobody sees what it gets

    def settle(self) -> None:
        """After the backward: custom Functions that were given a gradient and gave zeros."""
        for node in self._fed - self._passed:
            self.vanished.append(Vanished(node, node.name(), self._functions[node]))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _guard(self, node: Any, origin: NodeOrigin | None) -> Any:
        # the node, not a closure over its tensors: nothing is kept alive beyond the backward
        def hook(passed_on: tuple[Any, ...], received: tuple[Any, ...]) -> None:
            try:
                with torch.no_grad(), alone():
                    self._inspect(node, origin, passed_on, received)
            except Exception as error:  # ours: it must not end the user's backward
                self.session.broke(self, error)

        return hook

    def _inspect(
        self,
        node: Any,
        origin: NodeOrigin | None,
        passed_on: tuple[Any, ...],
        received: tuple[Any, ...],
    ) -> None:
        came = self._read(received)
        went = self._read(passed_on)
        if self._functions:
            self._look_around(node, came, went)
        if not came or not went:
            return
        self._look(node, origin, list(came.values()), list(went.values()))
        self.cancellations.look(node, origin, came, went)
        if self.blown and self.blown[-1].node is node:
            self.blown[-1].singular = _singular(node, received)
        if len(went) > 1:
            self._look_at_edges(node, origin, went)
        places = node.metadata.get(MARK + ".silent")
        if places is not None:
            self._look_at_places(node, next(iter(came.values())), places)
        for key in (MARK + ".kept", MARK + ".ends"):
            observe = node.metadata.get(key)
            if observe is not None:
                observe(next(iter(came.values())))

    def _look_around(self, node: Any, came: dict[int, Tensor], went: dict[int, Tensor]) -> None:
        if any(bool(g.any()) for g in came.values()):
            self._passed.update(self._behind.get(node, ()))
        for place, (child, _) in enumerate(node.next_functions):
            if child in self._functions and place in went and bool(went[place].any()):
                self._fed.add(child)

    def _read(self, gradients: tuple[Any, ...]) -> dict[int, Tensor]:
        """By place; nothing at all if one of them cannot be read, as it may be what differs."""
        present = {k: g for k, g in enumerate(gradients) if g is not None}
        values = {k: self.session.values(g) for k, g in present.items()}
        readable = {k: v for k, v in values.items() if v is not None}
        return readable if len(readable) == len(present) else {}

    def _look(
        self, node: Any, origin: NodeOrigin | None, came: list[Tensor], went: list[Tensor]
    ) -> None:
        name = node.name()
        finite = all(map(is_finite, came))
        if finite and not all(map(is_finite, went)):
            nan = any(bool(g.isnan().any()) for g in went)
            self.blown.append(Blown(node, name, origin, "nan" if nan else "inf"))
        elif (
            finite
            and not name.startswith(_SELECTORS)
            # most nodes pass something on: then what came need not be read
            and not any(bool(g.any()) for g in went)
            and any(bool(g.any()) for g in came)
        ):
            self.vanished.append(Vanished(node, name, origin))

    def _look_at_edges(self, node: Any, origin: NodeOrigin | None, went: dict[int, Tensor]) -> None:
        zero = [k for k, values in went.items() if not bool(values.any())]
        if zero and len(zero) < len(went):
            self.partial.append(Vanished(node, node.name(), origin, True, tuple(zero)))

    def _look_at_places(self, node: Any, came: Tensor, places: Tensor) -> None:
        if came.numel() != places.numel():
            return
        leaking = int((came.reshape(-1)[places.reshape(-1).to(came.device)] != 0).sum())
        if leaking:
            size, silent = places.numel(), int(places.sum())
            leak = Leak(node.name(), origin_of(node), leaking, silent, size)
            self.leaks.append(leak)


def _singular(node: Any, received: tuple[Any, ...]) -> bool:
    """Whether it is the slope that is not finite; a product may also overflow by a large gradient.

    Backward is linear: the node is asked again, with the same gradient made small.
    """
    contents = [values_of(g) for g in received if g is not None]
    sizes = [
        float(values.abs().max()) for values in contents if values is not None and values.numel()
    ]
    factor = 1.0 / max([1.0, *sizes])
    try:
        again = node(*(None if g is None else g * factor for g in received))
    except Exception as error:  # nodes that can be asked only once
        if is_the_programs(error):
            raise
        return False
    again = again if isinstance(again, tuple) else (again,)
    values = [values_of(g) for g in again if isinstance(g, Tensor)]
    return any(v is not None and not bool(v.isfinite().all()) for v in values)


def _with_origins(root: Any) -> Iterator[tuple[Any, NodeOrigin | None]]:
    """All nodes below. One call may make several nodes but marks only the last: the others, which
    are met behind it, are of the same call."""
    stack: list[tuple[Any, NodeOrigin | None]] = [(root, None)] if root is not None else []
    seen = {root}
    while stack:
        node, above = stack.pop()
        origin = origin_of(node) or above
        yield node, origin
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, origin))
