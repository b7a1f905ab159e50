"""What a value depends on, even where autograd no longer knows it.

Autograd forgets everything behind a cut. The taint of a tensor keeps two sets of parameters: those
that its value depends on, and those that a gradient can still reach; and the cuts that make the
difference. Python floats made by `.item()` carry their taint on through arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradient_doctor.findings import Site


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


class TracedFloat(float):
    """A float that remembers which tensors it came from; otherwise it is that float."""

    taint: Taint
    source: float | None  # the plain float of the program that this one stands for

    def __new__(
        cls, value: Any = 0.0, taint: Taint | None = None, source: float | None = None
    ) -> Any:
        if taint is None:
            return float(value)  # `type(x)(y)` in code that knows floats only: `statistics.mean`
        number = super().__new__(cls, value)
        number.taint, number.source = taint, source
        return number

    def __reduce__(self) -> Any:
        # what is saved with it must load where the doctor is not installed
        return float, (float.__pos__(self),)

    def __copy__(self) -> TracedFloat:
        return self

    def __deepcopy__(self, memo: Any) -> TracedFloat:
        return self


class Numbers:
    """The plain floats that `float(tensor)` gave, each known again as the object that it is.

    `float()` refuses to return a `TracedFloat`, but hands on the very object that `__float__` made.
    By their value they could not be told from constants of the program: 0.5 is often both.
    """

    def __init__(self) -> None:
        # the floats are kept with their taints: the id of one that has died is used again
        self._kept: dict[int, tuple[float, Taint]] = {}

    def keep(self, number: float, taint: Taint) -> None:
        self._kept[id(number)] = (number, taint)

    def get(self, number: float) -> Taint | None:
        kept = self._kept.get(id(number))
        return None if kept is None else kept[1]

    def clear(self) -> None:
        self._kept.clear()


def plain(value: Any) -> Any:
    """The same without traced floats, in dicts, lists and tuples too; itself if it has none.

    What holds no traced float is kept as it is; what is one object stays one, and what contains
    itself still does.
    """
    return _swapped(value, _holders(value), {})


def _parts(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return itertools.chain(value.keys(), value.values())
    return value if type(value) in (list, tuple) else ()


def _holders(value: Any) -> set[int]:
    """Ids of the containers that lead to a traced float."""
    above: dict[int, list[int]] = {id(value): []}  # of each container, those that hold it
    waiting, containers = [value], []
    while waiting:
        whole = waiting.pop()
        for part in _parts(whole):
            if type(part) is TracedFloat:
                containers.append(id(whole))
            elif type(part) in (dict, list, tuple):
                if id(part) not in above:
                    waiting.append(part)
                above.setdefault(id(part), []).append(id(whole))
    holders: set[int] = set()
    while containers:
        place = containers.pop()
        if place not in holders:
            holders.add(place)
            containers.extend(above[place])
    return holders


def _swapped(value: Any, holders: set[int], copies: dict[int, Any]) -> Any:
    if type(value) is TracedFloat:
        return copies.setdefault(id(value), float.__pos__(value))
    if id(value) not in holders:
        return value
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is tuple:
        items = tuple(_swapped(item, holders, copies) for item in value)
        return copies.setdefault(id(value), items)  # it may have been met again inside of itself
    new: Any = type(value)()
    copies[id(value)] = new  # before its parts: they may lead back to it
    if type(value) is dict:
        for key, item in value.items():
            new[_swapped(key, holders, copies)] = _swapped(item, holders, copies)
    else:
        new.extend(_swapped(item, holders, copies) for item in value)
    return new


def _carry(name: str) -> Any:
    plain = getattr(float, name)

    def method(self: TracedFloat, *others: Any) -> Any:
        result = plain(self, *others)
        if type(result) is not float:
            return result
        taints = [self.taint, *(o.taint for o in others if isinstance(o, TracedFloat))]
        depends, live, cuts, opaque = merged(taints)
        first = self.taint
        return TracedFloat(
            result, Taint(depends, live, cuts, first.site, first.op, first.step, opaque)
        )

    method.__name__ = name
    return method


for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
    *("__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__neg__", "__pos__", "__abs__"),
):
    setattr(TracedFloat, _name, _carry(_name))


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
    _collect(value, depth, tensors, [], None)
    return tensors


def inputs_in(args: Any, kwargs: Any, numbers: Numbers) -> tuple[list[Tensor], list[TracedFloat]]:
    """Tensors and traced floats among arguments; `numbers` are the plain floats that are known."""
    tensors: list[Tensor] = []
    floats: list[TracedFloat] = []
    _collect(args, 4, tensors, floats, numbers)
    if kwargs:
        _collect(kwargs, 4, tensors, floats, numbers)
    return tensors, floats


def _collect(
    value: Any,
    depth: int,
    tensors: list[Tensor],
    floats: list[TracedFloat],
    numbers: Numbers | None,
) -> None:
    if isinstance(value, Tensor):
        tensors.append(value)
    elif type(value) is TracedFloat:
        floats.append(value)
    elif type(value) is float:
        taint = None if numbers is None else numbers.get(value)
        if taint is not None:
            floats.append(TracedFloat(value, taint, value))
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, depth - 1, tensors, floats, numbers)
    elif depth and isinstance(value, dict):
        for item in value.values():
            _collect(item, depth - 1, tensors, floats, numbers)
