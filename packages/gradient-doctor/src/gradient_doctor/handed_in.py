"""Who chose a value that a function was handed: `requires_grad_(trainable)`, `net.to(dtype)`.

A function that does what its argument says is not at fault: the line to change is the call that
handed the argument in, or left it to its default. Read from the source, along the lines that were
running.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable

from gradient_doctor.findings import Site
from gradient_doctor.sites import is_user_file
from gradient_doctor.slips import calls_in, function_around, statement_at

_CONVERSIONS = {"to", "type"}


@functools.lru_cache(maxsize=1024)
def chooser_of_freezing(lines: tuple[Site, ...]) -> Site | None:
    """Where it was chosen what the innermost line sets requires_grad to."""
    return _climb(lines, _switched)


@functools.lru_cache(maxsize=1024)
def chooser_of_dtype(lines: tuple[Site, ...]) -> Site | None:
    """Where the dtype was chosen that the innermost line converts to."""
    return _climb(lines, _converted)


def _switched(statement: ast.stmt) -> list[ast.expr]:
    values = [
        call.args[0]
        for call in ast.walk(statement)
        if isinstance(call, ast.Call) and _name(call.func) == "requires_grad_" and call.args
    ]
    if isinstance(statement, ast.Assign) and _name(statement.targets[0]) == "requires_grad":
        values.append(statement.value)
    return values


def _converted(statement: ast.stmt) -> list[ast.expr]:
    calls = [
        call
        for call in ast.walk(statement)
        if isinstance(call, ast.Call) and _name(call.func) in _CONVERSIONS
    ]
    return [
        value
        for call in calls
        for value in (*call.args, *(word.value for word in call.keywords if word.arg == "dtype"))
    ]


def _climb(lines: tuple[Site, ...], values_in: Callable[[ast.stmt], list[ast.expr]]) -> Site | None:
    """From caller to caller while the value is an argument of the function around it."""
    if not lines or not is_user_file(lines[0].file):
        return None
    statement = statement_at(lines[0])
    if statement is None or isinstance(statement, (ast.For, ast.While, ast.If, ast.With)):
        return None
    values = values_in(statement)
    place: Site | None = None
    for inner, outer in itertools.pairwise(lines):
        function = function_around(inner)
        if function is None or len(values) != 1 or not isinstance(values[0], ast.Name):
            break
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        names = [argument.arg for argument in arguments]
        if values[0].id not in names or _assigned(function, values[0].id):
            break
        place = outer
        values = _handed(function, names, values[0].id, outer)
    return place


def _handed(
    function: ast.FunctionDef | ast.AsyncFunctionDef, names: list[str], name: str, line: Site
) -> list[ast.expr]:
    """What the call at a line gives for an argument; nothing, if it is left to its default."""
    shift = 1 if names and names[0] in ("self", "cls") else 0
    for call in calls_in(line.file):
        if not call.lineno <= line.line <= (call.end_lineno or call.lineno):
            continue
        if _name(call.func) != function.name and function.name != "__init__":
            continue
        words = [word.value for word in call.keywords if word.arg == name]
        if words:
            return words
        place = names.index(name) - shift
        if len(call.args) > place >= 0:
            return [call.args[place]]
    return []


def _assigned(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Whether the function itself gives this name another value."""
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(function)
    )


def _name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
