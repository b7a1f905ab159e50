"""Why was nothing selected? The line that computed lengths, counts or masks that are all empty.

A loop over responses that skips the empty ones, or a slice of length 0, leaves a constant loss. The
culprit is where the lengths come from: a variable of the running functions whose numbers are all 0,
followed back through the calls that hand it on. Read from the source alone; nothing is run.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from gradient_doctor.findings import Site
from gradient_doctor.sites import is_user_code

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
