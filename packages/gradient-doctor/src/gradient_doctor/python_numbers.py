"""Python numbers that left torch, and what they depend on when they come back.

`.item()`, `.tolist()` and `float()` hand out plain floats and nothing else: libraries choose by
exact type, and a number that is read in a traced step lives on in the user's program. A float that
enters a torch call is known again

- as the very object that left, in lists, tuples and dicts too, or
- by the expression that brings it: `0.3 * reward` reads `reward`, and `reward = hits.item() / 8`
  stands on a line where a number left in this step.

The second way reads the program's source; a constant of the program is never taken for data.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from gradient_doctor.sites import calling_frame
from gradient_doctor.taint import Taint, collect, merged

_DEEP = 6  # assignments followed from one name to the next
_READERS = {"item", "tolist"}
_NUMERIC = {"float", "int", "len", "round"}
_GROWING = {"append", "appendleft", "extend", "insert", "add", "update", "setdefault"}


@dataclass(frozen=True)
class Number:
    """A float among the arguments of a call, and the tensors that it came from."""

    value: float
    taint: Taint


class Running(NamedTuple):
    """A frame of the user's, and the instruction in it that is being run."""

    frame: FrameType
    instruction: int
    line: int

    @classmethod
    def now(cls, frame: FrameType) -> Running:
        return cls(frame, frame.f_lasti, frame.f_lineno)


class Numbers:
    """The floats that left torch in this step."""

    def __init__(self) -> None:
        # the floats are kept with their taints: the id of one that has died is used again
        self._kept: dict[int, tuple[float, Taint]] = {}
        self._lines: dict[tuple[str, int], list[Taint]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, number: float, taint: Taint) -> None:
        self._kept[id(number)] = (number, taint)
        if taint.site is not None:
            self._lines.setdefault(taint.site.place, []).append(taint)

    def clear(self) -> None:
        self._kept.clear()
        self._lines.clear()

    def known(self, number: float) -> Taint | None:
        """The taint of a float that is one of the objects handed out."""
        kept = self._kept.get(id(number))
        return None if kept is None else kept[1]

    def behind(self, number: float, place: Running | None) -> Taint | None:
        """The taint of a float that the user's running expression made from numbers of the step."""
        known = self.known(number)
        if known is not None or not self._kept or place is None:
            return known
        code = place.frame.f_code
        if any(constant is number for constant in _constants(code)):
            return None
        source = _source(code.co_filename)
        expression = None if source is None else source.running(place)
        if source is None or expression is None:
            return None
        taints = _Trail(self, source, place).of_number(number, expression)
        return _one(taints) if taints else None

    def among(self, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Number]]:
        """Tensors among the arguments of a call, and the floats that came from tensors."""
        tensors: list[Tensor] = []
        floats: list[float] = []
        collect(args, 4, tensors, floats)
        if kwargs:
            collect(kwargs, 4, tensors, floats)
        if not floats or not self._kept:
            return tensors, []
        frame = calling_frame()
        place = None if frame is None else Running.now(frame)
        taints = [(value, self.behind(value, place)) for value in floats]
        return tensors, [Number(value, taint) for value, taint in taints if taint is not None]

    def on_lines(self, file: str, node: ast.AST) -> list[Taint]:
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        return [t for line in range(first, last + 1) for t in self._lines.get((file, line), ())]


def _one(taints: list[Taint]) -> Taint:
    depends, live, cuts, opaque = merged(taints)
    first = taints[0]
    return Taint(depends, live, cuts, first.site, first.op, first.step, opaque)


@functools.lru_cache(maxsize=512)
def _constants(code: CodeType) -> tuple[Any, ...]:
    """Floats that are written in the program."""
    return tuple(constant for constant in code.co_consts if type(constant) is float)


# the source


@dataclass
class _Scope:
    """What a function (or the module) assigns to its names, and what it returns."""

    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    returned: list[ast.expr] = field(default_factory=list)

    def add(self, target: ast.AST, value: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, (ast.Name, ast.Attribute)):
                self.assigned.setdefault(_key(node), []).append(value)


def _key(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else f".{node.attr}"


class _Source:
    """One file: its scopes, its attributes, and the expression that runs at a place."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.file = file
        self.attributes = _Scope()  # of any object: `self.baseline` in all methods
        self.functions: dict[str, list[_Scope]] = {}
        self._scopes: list[tuple[int, int, _Scope]] = []
        self._expressions: dict[tuple[int, int | None, int, int | None], ast.expr] = {}
        self._statements: list[ast.stmt] = []
        self._enter(tree, _Scope(), 0, sys.maxsize)

    def _enter(self, owner: ast.AST, scope: _Scope, first: int, last: int) -> None:
        self._scopes.append((first, last, scope))
        for child in ast.iter_child_nodes(owner):
            self._visit(child, scope)

    def _visit(self, node: ast.AST, scope: _Scope) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = _Scope()
            self.functions.setdefault(node.name, []).append(inner)
            self._enter(node, inner, node.lineno, node.end_lineno or node.lineno)
            return
        if isinstance(node, ast.stmt):
            self._statements.append(node)
        elif isinstance(node, ast.expr):
            place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
            self._expressions[place] = node
        for target, value in _assignments(node):
            scope.add(target, value)
            self.attributes.add(target, value)
        if isinstance(node, ast.Return) and node.value is not None:
            scope.returned.append(node.value)
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope)

    def scope(self, line: int) -> _Scope:
        """The innermost function around a line."""
        around = [s for s in self._scopes if s[0] <= line <= s[1]]
        return min(around, key=lambda s: s[1] - s[0])[2]

    def running(self, place: Running) -> ast.AST | None:
        """The expression that is being evaluated; its statement where Python has no columns."""
        positions = place.frame.f_code.co_positions()
        columns: Any = next(islice(positions, place.instruction // 2, None), None)
        if columns in self._expressions:
            return self._expressions[columns]
        line = place.line
        around = [s for s in self._statements if s.lineno <= line <= (s.end_lineno or s.lineno)]
        return min(around, key=lambda s: (s.end_lineno or 0) - s.lineno, default=None)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Targets and values, also of loops and of methods that put a value into a container."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, (ast.For, ast.comprehension)):
        yield node.target, node.iter
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _GROWING
    ):
        yield from ((node.func.value, argument) for argument in node.args)


@functools.lru_cache(maxsize=64)
def _source(file: str) -> _Source | None:
    lines = linecache.getlines(file)
    try:
        return _Source(file, ast.parse("".join(lines))) if lines else None
    except (SyntaxError, ValueError):  # not Python's own source: a notebook's magic, a template
        return None


# from an expression to numbers that left


class _Trail:
    """Follows names and calls from one expression back to the lines where numbers left."""

    def __init__(self, numbers: Numbers, source: _Source, place: Running) -> None:
        self.numbers, self.source = numbers, source
        self.line = place.line
        self._values = _Values(place.frame)
        self._seen: set[tuple[int, str]] = set()

    def of_number(self, number: float, expression: ast.AST) -> list[Taint]:
        """Taints behind one operand or argument of the running expression."""
        parts = [part for part in _operands(expression) if self._is_number(part) is not False]
        same = [part for part in parts if self._values.of(part) is number]
        scope = self.source.scope(self.line)
        return [t for part in same or parts for t in self._taints(part, scope, _DEEP)]

    def _is_number(self, node: ast.AST) -> bool | None:
        """None: it cannot be seen from here."""
        if isinstance(node, ast.Constant):
            return False  # known: it is no data
        if isinstance(node, (ast.Name, ast.Attribute)):
            value = self._values.of(node)
            return None if value is None else isinstance(value, (int, float, list, tuple, dict))
        if isinstance(node, ast.UnaryOp):
            return self._is_number(node.operand)
        if isinstance(node, ast.BinOp):
            sides = {self._is_number(s) for s in (node.left, node.right) if not _is_constant(s)}
            return False if False in sides else (None if None in sides else True)
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            return True if name in _READERS or called in _NUMERIC else None
        return None

    def _taints(self, expression: ast.AST, scope: _Scope, deep: int) -> Iterator[Taint]:
        for node in ast.walk(expression):
            if isinstance(node, ast.Call):
                yield from self._of_call(node, deep)
            elif isinstance(node, (ast.Name, ast.Attribute)):
                yield from self._of_name(node, scope, deep)

    def _of_call(self, node: ast.Call, deep: int) -> Iterator[Taint]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _READERS or called == "float":
            yield from self.numbers.on_lines(self.source.file, node)
        if deep and (name or called) and self._first(0, f"{name or called}()"):
            for function in self.source.functions.get(name or called, ()):
                for value in function.returned:
                    yield from self._taints(value, function, deep - 1)

    def _of_name(self, node: ast.Name | ast.Attribute, scope: _Scope, deep: int) -> Iterator[Taint]:
        yield from self._held(self._values.of(node), 2)
        if isinstance(node, ast.Attribute):
            scope = self.source.attributes
        if deep and self._first(id(scope), _key(node)):
            for value in scope.assigned.get(_key(node), ()):
                yield from self._taints(value, scope, deep - 1)

    def _held(self, value: Any, deep: int) -> Iterator[Taint]:
        if type(value) is float:
            taint = self.numbers.known(value)
            if taint is not None:
                yield taint
        elif deep and isinstance(value, (list, tuple)):
            for item in value:
                yield from self._held(item, deep - 1)
        elif deep and type(value) is dict:
            for item in value.values():
                yield from self._held(item, deep - 1)

    def _first(self, scope: int, key: str) -> bool:
        new = (scope, key) not in self._seen
        self._seen.add((scope, key))
        return new


def _operands(node: ast.AST) -> Iterable[ast.AST]:
    """The values that an operation or a call takes."""
    if isinstance(node, ast.BinOp):
        return (node.left, node.right)
    if isinstance(node, ast.Call):
        return (*node.args, *(keyword.value for keyword in node.keywords))
    if isinstance(node, ast.AugAssign):
        return (node.value,)
    return (node,)


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant)


class _Values:
    """What the names of a frame hold, without keeping it.

    Before Python 3.13 `f_locals` is a copy that the frame holds on to, tensors included: it is
    emptied again, unless the user's code has asked for it too.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame

    def of(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            # the instance's own: a property would run the user's code
            return getattr(self._name(node.value.id), "__dict__", {}).get(node.attr)
        return None

    def _name(self, name: str) -> Any:
        frame = self._frame
        here: Mapping[str, Any] = frame.f_locals
        value = here.get(name, frame.f_globals.get(name))
        copied = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13)
        if copied and isinstance(here, dict) and sys.getrefcount(here) <= 3:
            here.clear()
        return value
