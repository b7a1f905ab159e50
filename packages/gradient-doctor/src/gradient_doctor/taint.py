"""What a value depends on, even where autograd no longer knows it.

Autograd forgets everything behind a cut. The taint of a tensor keeps two sets of parameters: those
that its value depends on, and those that a gradient can still reach; and the cuts that make the
difference. Numbers of Python that came from tensors are in `python_numbers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradient_doctor.findings import Site

GRAD = "autograd.grad"  # the operation of a cut: its results have a graph only on request


@dataclass(eq=False)
class Region:
    """A stretch of the program without gradients, and the line that entered it."""

    kind: str
    site: Site | None
    ops: int = 0


@dataclass(eq=False)
class Cut:
    """A place where the path of gradients ends.

    `kind`: region (no_grad, inference_mode), explicit (detach, data, numpy, tensor of a tensor),
    scalar (item, float, tolist), integer (argmax, comparison, long), zero (round, sign),
    checkpoint (reentrant, no input needs gradient), function (a custom Function's output).
    """

    kind: str
    op: str
    site: Site | None
    step: int
    depends: int
    region: Region | None = None
    count: int = 1
    shape: tuple[int, ...] = ()
    graph: int = 0  # those of `depends` that came in a graph, not as parameters themselves


@dataclass(slots=True)
class Taint:
    """`depends` and `live` are sets of parameter bits; `live` is what autograd can still reach."""

    depends: int
    live: int
    cuts: frozenset[Cut]
    site: Site | None
    op: str
    step: int
    opaque: frozenset[str] = frozenset()
    drawn: bool = False  # a draw by rsample, or a simple function of one

    def cutting(self, mask: int) -> list[Cut]:
        """The cuts that stand between some of these parameters and the value."""
        return [cut for cut in self.cuts if cut.depends & mask]


NO_CUTS: frozenset[Cut] = frozenset()


def merged(taints: Iterable[Taint]) -> tuple[int, int, frozenset[Cut], frozenset[str]]:
    depends = live = 0
    cuts, opaque = NO_CUTS, frozenset()
    for taint in taints:
        depends |= taint.depends
        live |= taint.live
        if taint.cuts and taint.cuts is not cuts:
            cuts = cuts | taint.cuts if cuts else taint.cuts
        if taint.opaque:
            opaque = opaque | taint.opaque
    return depends, live, cuts, opaque


def in_graphs(taints: Iterable[Taint]) -> int:
    """The parameters that reach us through a graph; a parameter itself is a leaf."""
    mask = 0
    for taint in taints:
        if taint.op != "leaf":
            mask |= taint.live
    return mask


@dataclass
class CutBook:
    """One entry per place: the thousandth detach of a line is the first one again."""

    cuts: dict[Any, Cut] = field(default_factory=dict)

    def enter(self, key: Any, make: Any, depends: int) -> Cut:
        cut = self.cuts.get(key)
        if cut is None:
            cut = self.cuts[key] = make()
        else:
            cut.count += 1
        cut.depends |= depends
        return cut

    def clear(self) -> None:
        self.cuts.clear()


def tensors_in(value: Any, depth: int = 3) -> list[Tensor]:
    """Tensors among arguments or results, in lists, tuples and dicts too."""
    tensors: list[Tensor] = []
    collect(value, depth, tensors, [])
    return tensors


def collect(value: Any, depth: int, tensors: list[Tensor], floats: list[float]) -> None:
    """Tensors and floats of Python among arguments, in the order in which they stand."""
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, float):
        floats.append(value)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            collect(item, depth - 1, tensors, floats)
    elif depth and isinstance(value, dict):
        for item in value.values():
            collect(item, depth - 1, tensors, floats)
