"""Python numbers that left torch, and what they depend on when they come back.

`.item()`, `.tolist()` and `float()` hand out plain floats and nothing else: libraries choose by
exact type, and a number that is read in a traced step lives on in the user's program. A float that
enters a torch call is known again

- as the very object that left, in lists, tuples and dicts too, or
- by the expression that brings it: `0.3 * reward` reads `reward`, and `reward = hits.item() / 8`
  stands on a line where a number left in this step.

The second way reads the program's source, where it is the one that runs; of several assignments to
a name the last before the running line counts. A constant of the program is never taken for data.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from gradient_doctor.constructors import constructor_of
from gradient_doctor.sites import calling_frame
from gradient_doctor.taint import Taint, collect, merged

_DEEP = 6  # assignments followed from one name to the next
_CALLERS = 2  # functions whose arguments are followed to the caller
_STARTED = time.time()
_MOST = 4  # floats of one call that are looked for in the source
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
        self._lines: dict[tuple[str, int], Taint] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, number: float, taint: Taint) -> None:
        self._kept[id(number)] = (number, taint)
        if taint.site is not None:
            before = self._lines.get(taint.site.place)
            if before is not taint:
                self._lines[taint.site.place] = taint if before is None else _one([before, taint])

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
        if source is not None and not source.runs(code):
            return None  # edited since it was imported: its lines say nothing of what runs
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
        numbers, looked = [], 0
        for value in floats:
            taint = self.known(value)
            if taint is None and looked < _MOST:
                taint, looked = self.behind(value, place), looked + 1
            if taint is not None:
                numbers.append(Number(value, taint))
        return tensors, numbers

    def on_lines(self, file: str, node: ast.AST) -> list[Taint]:
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        lines = ((file, line) for line in range(first, last + 1))
        return [self._lines[line] for line in lines if line in self._lines]


def _one(taints: list[Taint]) -> Taint:
    depends, live, cuts, opaque = merged(taints)
    first = taints[0]
    return Taint(depends, live, cuts, first.site, first.op, first.step, opaque)


def _constants(code: CodeType) -> Iterator[float]:
    """Floats that are written in the program."""
    return (constant for constant in code.co_consts if type(constant) is float)


# the source


@dataclass
class _Scope:
    """What a function (or the module) assigns to its names and attributes, and what it returns."""

    outer: _Scope | None = None
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    added: set[int] = field(default_factory=set)  # of these, what `+=` adds to the one before
    returned: list[ast.expr] = field(default_factory=list)

    def add(self, target: ast.AST, value: ast.expr) -> None:
        """The target alone: names in its index, or the object of an attribute, get no value."""
        if isinstance(target, (ast.Tuple, ast.List)):
            same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            values = value.elts if same else [value] * len(target.elts)  # type: ignore[union-attr]
            for part, its_value in zip(target.elts, values):
                self.add(part, its_value)
        elif isinstance(target, (ast.Subscript, ast.Starred)):
            self.add(target.value, value)
        elif (key := _key(target)) is not None:
            self.assigned.setdefault(key, []).append(value)

    def values(self, key: str, line: int | None) -> list[ast.expr]:
        """What a name may hold; at a line: what was assigned last, with what was added to it.

        Of an enclosing function where this one has no such name.
        """
        assigned = sorted(self.assigned.get(key, []), key=lambda value: value.lineno)
        if not assigned and self.outer is not None:
            return self.outer.values(key, None)
        before = [v for v in assigned if line is not None and v.lineno <= line]
        for first in range(len(before) - 1, -1, -1):
            if id(before[first]) not in self.added:
                return before[first:]
        return before or assigned


def _key(node: ast.AST) -> str | None:
    """`name`, or `name.attribute`; None for anything longer."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return None


class _Source:
    """One file: its scopes, its attributes, and the expression that runs at a place."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        tree = ast.parse(text)
        self.attributes = _Scope()  # of `self` in all methods of the file
        self.functions: dict[str, list[_Scope]] = {}
        self._edited = _changed_at(file) > _STARTED
        self._codes = {_same(code) for code in _codes(compile(text, file, "exec"))}
        self._scopes: list[tuple[int, int, _Scope]] = []
        self._expressions: dict[tuple[int, int | None, int, int | None], ast.expr] = {}
        self._statements: list[ast.stmt] = []
        self._visit(tree)

    def _visit(self, tree: ast.Module) -> None:
        scope = _Scope()
        self._scopes.append((0, sys.maxsize, scope))
        waiting: list[tuple[ast.AST, _Scope]] = [(tree, scope)]  # a long sum is a deep tree
        while waiting:
            node, scope = waiting.pop()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                scope = _Scope(scope)
                self.functions.setdefault(node.name, []).append(scope)
                self._scopes.append((node.lineno, node.end_lineno or node.lineno, scope))
            elif isinstance(node, ast.stmt):
                self._statements.append(node)
            elif isinstance(node, ast.expr):
                place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
                self._expressions[place] = node
            for target, value in _assignments(node):
                for where in (scope, self.attributes):
                    where.add(target, value)
                    if isinstance(node, ast.AugAssign):
                        where.added.add(id(value))
            if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None:
                scope.returned.append(node.value)
            waiting.extend((child, scope) for child in ast.iter_child_nodes(node))

    def runs(self, code: CodeType) -> bool:
        """Whether this text is what the code was made from. (pytest changes code: its asserts.)"""
        return not self._edited or _same(code) in self._codes

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


def _changed_at(file: str) -> float:
    try:
        return os.stat(file).st_mtime
    except OSError:  # a notebook's cell
        return 0.0


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _same(code: CodeType) -> tuple[str, int, bytes, tuple[str, ...]]:
    return code.co_name, code.co_firstlineno, code.co_code, code.co_names


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
    text = "".join(linecache.getlines(file))
    try:
        return _Source(file, text) if text else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # a notebook's magic, a template, a machine's own program: not to be read


def running_constructor() -> str | None:
    """What copies a tensor's number into a new tensor or array: the call that is running now."""
    frame = calling_frame()
    source = None if frame is None else _source(frame.f_code.co_filename)
    if frame is None or source is None or not source.runs(frame.f_code):
        return None
    return constructor_of(source.running(Running.now(frame)))


# from an expression to numbers that left


class _Trail:
    """Follows names and calls from one expression back to the lines where numbers left."""

    def __init__(
        self, numbers: Numbers, source: _Source, place: Running, *, callers: int = _CALLERS
    ) -> None:
        self.numbers, self.source = numbers, source
        self._place, self._callers = place, callers
        self._here = source.scope(place.line)
        self._values = Values(place.frame)
        self._seen: set[tuple[int, str]] = set()

    def of_number(self, number: float, expression: ast.AST) -> list[Taint]:
        """Taints behind one operand or argument of the running expression."""
        parts = [part for part in _operands(expression) if self._is_number(part) is not False]
        same = [part for part in parts if self._values.of(part) is number]
        return [t for part in same or parts for t in self._taints(part, self._here, _DEEP)]

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
        key = _key(node)
        if key is None:
            return
        here = scope is self._here  # else: of a function that has returned, whose names are gone
        held = self._values.of(node) if here else None
        yield from self._held(held, 2)
        if here and not isinstance(held, (float, list, tuple, dict, type(None))):
            return  # a tensor, a module, a function: what it depends on is known otherwise
        where = self.source.attributes if isinstance(node, ast.Attribute) else scope
        if not deep or not self._first(id(where), key):
            return
        last = here and type(held) is float and isinstance(node, ast.Name)
        for value in where.values(key, self._place.line if last else None):
            yield from self._taints(value, scope, deep - 1)
        if last and key in self._values.parameters:
            yield from self._given(deep)

    def _given(self, deep: int) -> Iterator[Taint]:
        """An argument: the expression of the caller that gave it."""
        caller = self._place.frame.f_back
        source = None if caller is None else _source(caller.f_code.co_filename)
        if caller is None or source is None or not source.runs(caller.f_code):
            return
        place = Running.now(caller)
        expression = source.running(place)
        if expression is not None and self._callers:
            trail = _Trail(self.numbers, source, place, callers=self._callers - 1)
            for part in _operands(expression):
                if trail._is_number(part) is not False:
                    yield from trail._taints(part, trail._here, deep - 1)

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


def names_in(frame: FrameType) -> dict[str, Any]:
    """The names of a frame and what they hold; not to be changed.

    Before Python 3.13 `f_locals` is a copy that the frame holds on to, tensors included: it is
    emptied again, unless the user's code has asked for it too.
    """
    here = frame.f_locals
    names = here if here is frame.f_globals else dict(here)
    copied = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13)
    if copied and isinstance(here, dict) and sys.getrefcount(here) <= 3:
        here.clear()
    return names


class Values:
    """What the names of a frame hold."""

    def __init__(self, frame: FrameType) -> None:
        code = frame.f_code
        self._names = names_in(frame)
        self._globals = frame.f_globals
        self.parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    def named(self, name: str) -> Any:
        return self._names.get(name)

    def everything(self) -> list[Any]:
        """The values of the names, and of the attributes of an instance whose method it is."""
        own = getattr(self._names.get("self"), "__dict__", {})
        return [*self._names.values(), *own.values()]

    def of(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Name):
            return self._names.get(node.id, self._globals.get(node.id))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            # the instance's own: a property would run the user's code
            return getattr(self.of(node.value), "__dict__", {}).get(node.attr)
        return None
