"""Why was nothing selected? The line that computed lengths, counts or masks that are all empty.

A loop over responses that skips the empty ones, or a slice of length 0, leaves a constant loss. The
culprit is where the lengths come from: a variable of the running functions whose numbers are all 0,
followed back through the calls that hand it on. Where these functions have ended, it is a line of
this step that took numbers out of tensors, in a function that cuts a difference off at 0:
`max(0, mask.sum() - width)`. Read from the source alone; nothing is run.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from gradient_doctor.findings import Site
from gradient_doctor.sites import is_user_code, is_user_file

_DEEP = 6  # functions to follow an assignment through
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Empty:
    """A variable whose numbers are all 0."""

    name: str
    site: Site


def find_empty_lengths(frame: FrameType | None) -> Empty | None:
    """The first such variable, from the inside out, that some line of the program computed."""
    while frame is not None:
        code = frame.f_code
        if is_user_code(code):
            for name, value in list(frame.f_locals.items()):
                if _all_zero(value):
                    line = _assigned(_tree(code.co_filename), code.co_name, name, frame.f_lineno)
                    if line is not None:
                        return Empty(name, Site(code.co_filename, line, code.co_name))
        frame = frame.f_back
    return None


def find_floored_difference(counts: Iterable[tuple[Site | None, bool]]) -> Site | None:
    """The line of a difference that is cut off at 0, in a function that one of these lines is in.

    By each line: whether it made a Python number, of which `max` is taken, or whole numbers of a
    tensor, which are clamped.
    """
    for site, is_number in counts:
        tree = None if site is None or not is_user_file(site.file) else _tree(site.file)
        if tree is None or site is None:
            continue
        around = [f for f in ast.walk(tree) if isinstance(f, _FUNCTIONS) and _is_in(site.line, f)]
        scope = max(around, key=lambda f: f.lineno, default=None)
        lines = (
            []
            if scope is None
            else list(_floored(scope, _OF_NUMBERS if is_number else _OF_TENSORS))
        )
        if lines:
            nearest = min(lines, key=lambda line: abs(line - site.line))
            return Site(site.file, nearest, site.function, site.module)
    return None


def _is_in(line: int, function: ast.stmt) -> bool:
    return function.lineno <= line <= (function.end_lineno or function.lineno)


_OF_NUMBERS = {"max"}
_OF_TENSORS = {"maximum", "clamp", "clamp_min", "clip", "relu"}


def _floored(scope: ast.AST, functions: set[str]) -> Iterator[int]:
    """Lines of differences whose negative values become 0."""
    differences = {t: v for t, v in _assignments(scope) if _is_difference(v)}
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        values = [*node.args, *(k.value for k in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            values.append(node.func.value)  # (a - b).clamp(min=0)
        cuts = name in functions and (name == "relu" or any(map(_is_zero, values)))
        for value in values if cuts else ():
            if _is_difference(value):
                yield value.lineno
            elif isinstance(value, ast.Name) and value.id in differences:
                yield differences[value.id].lineno


def _is_difference(value: ast.expr) -> bool:
    if isinstance(value, ast.Call) and len(value.args) == 1:  # int(a - b)
        value = value.args[0]
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub)


def _is_zero(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value in (0, 0.0)


def _all_zero(value: Any) -> bool:
    """Several whole numbers, none of them above 0; a single 0 may be an index."""
    if isinstance(value, Tensor):
        counts = not value.is_floating_point() and not value.is_complex() and value.dim() == 1
        return counts and value.numel() > 1 and not bool(value.any())
    if isinstance(value, (list, tuple)) and len(value) > 1:
        return all(type(item) is int and item == 0 for item in value)
    return False


@functools.lru_cache(maxsize=32)
def _tree(filename: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return None


def _assigned(tree: ast.Module | None, function: str, name: str, before: int) -> int | None:
    """The line that computed a variable of a function: behind calls, that of what they return."""
    if tree is None:
        return None
    scope: Any = tree if function == "<module>" else _function(tree, function)
    found: ast.expr | None = None
    for target, value in _assignments(scope):
        if target == name and value.lineno <= before:
            found = value
    return None if found is None else _computed(tree, found, _DEEP)


def _computed(tree: ast.Module, value: ast.expr, deep: int) -> int:
    """The line of an expression; of a call of the program's own function, what that computes."""
    called = _called(tree, value)
    if called is None or not deep:
        return value.lineno
    returned = [n.value for n in ast.walk(called) if isinstance(n, ast.Return) and n.value]
    if len(returned) != 1:
        return value.lineno
    result = returned[0]
    if isinstance(result, ast.Name):
        made = [v for target, v in _assignments(called) if target == result.id]
        return _computed(tree, made[-1], deep - 1) if made else result.lineno
    return _computed(tree, result, deep - 1)


def _called(tree: ast.Module, value: ast.expr) -> Any:
    """The function behind `f(...)`, or behind the elements of `[f(...) for ...]`."""
    if isinstance(value, (ast.ListComp, ast.GeneratorExp)):
        value = value.elt
    if not isinstance(value, ast.Call):
        return None
    if isinstance(value.func, ast.Name):
        return _function(tree, value.func.id)
    if isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Name):
        return _function(tree, value.func.attr) if value.func.value.id == "self" else None
    return None


def _function(tree: ast.Module, name: str) -> Any:
    functions = [n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS) and n.name == name]
    return functions[0] if len(functions) == 1 else None


def _assignments(scope: Any) -> Iterator[tuple[str, ast.expr]]:
    """Names that are assigned to, with what they are assigned, in the order of the source."""
    for node in ast.walk(scope) if scope is not None else ():
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
