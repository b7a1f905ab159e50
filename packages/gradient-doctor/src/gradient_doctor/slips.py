"""Statements that do nothing, or something else than they look: read from the source alone.

`optimizer.step` without parentheses, `module.requires_grad = False` (a module has no such switch),
`p.require_grad = False`, `optimizer.lr = 1e-4`. Python accepts them all. A detector that has seen
the effect asks here for the line; nothing is run, and nothing is said on the source's word alone.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator

from gradient_doctor.findings import Site
from gradient_doctor.sites import is_user_file


def bare_attribute(files: Iterable[str], name: str) -> Site | None:
    """The first statement `something.name` that is nothing else: a call without parentheses."""
    for file, node in _statements(files):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Attribute) and value.attr == name:
            return Site(file, node.lineno)
    return None


def assigned_attribute(files: Iterable[str], names: Iterable[str]) -> Site | None:
    """The first statement `something.name = ...` with one of these names."""
    wanted = set(names)
    for file, node in _statements(files):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in wanted:
                return Site(file, node.lineno)
    return None


def assigned_name(file: str, name: str) -> Site | None:
    """The first statement `name = ...` or `something.name = ...`."""
    for _, node in _statements([file]):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            for part in parts:
                if name == (part.attr if isinstance(part, ast.Attribute) else _id(part)):
                    return Site(file, node.lineno)
    return None


def statement_at(site: Site) -> ast.stmt | None:
    """The smallest statement that a line is part of."""
    around = [
        (node.end_lineno or node.lineno, node)
        for _, node in _statements([site.file])
        if node.lineno <= site.line <= (node.end_lineno or node.lineno)
    ]
    return min(around, key=lambda one: one[0] - one[1].lineno, default=(0, None))[1]


def _id(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def calls_of(files: Iterable[str], owner: str, method: str) -> list[Site]:
    """Lines of `owner.method(...)`, `self.owner.method(...)` and the like."""
    sites = []
    for file in dict.fromkeys(files):
        tree = _tree(file) if is_user_file(file) else None
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            value = node.func.value
            name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", None)
            if node.func.attr == method and name == owner:
                sites.append(Site(file, node.lineno))
    return sites


def filled_at(site: Site) -> Site | None:
    """Where the list is filled that the call at this line takes: `torch.tensor(rewards)`.

    Only if one statement of the same function fills it.
    """
    function = _function_around(site)
    call = _call_at(function, site.line) if function is not None else None
    if function is None or call is None or not call.args:
        return None
    argument = call.args[0]
    name = argument.id if isinstance(argument, ast.Name) else None
    fills = [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("append", "extend")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == name
    ]
    return Site(site.file, fills[0], site.function) if name and len(fills) == 1 else None


def is_method(site: Site) -> bool:
    """Whether a line stands in a method."""
    function = _function_around(site)
    arguments = [] if function is None else function.args.args
    return bool(arguments) and arguments[0].arg in ("self", "cls")


def source_of_function(site: Site) -> str:
    """The source of the function that a line stands in; empty for the module's own lines."""
    function = _function_around(site)
    if function is None or function.end_lineno is None:
        return ""
    lines = range(function.lineno, function.end_lineno + 1)
    return "".join(linecache.getline(site.file, line) for line in lines)


def _function_around(site: Site) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost function of a line."""
    tree = _tree(site.file) if is_user_file(site.file) else None
    around = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno <= site.line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _call_at(function: ast.AST, line: int) -> ast.Call | None:
    """The innermost call of a line that makes a tensor of something."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and node.lineno == line:
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in ("tensor", "as_tensor", "FloatTensor", "Tensor"):
                return node
    return None


def surroundings(site: Site) -> str:
    """The line itself and the heads of the loops, conditions and `with`s that it stands in."""
    tree = _tree(site.file) if is_user_file(site.file) else None
    heads = [linecache.getline(site.file, site.line)]
    for node in ast.walk(tree) if tree is not None else ():
        compound = isinstance(node, (ast.For, ast.While, ast.If, ast.With))
        if compound and node.lineno < site.line <= (node.end_lineno or node.lineno):
            heads.append(linecache.getline(site.file, node.lineno))
    return "".join(heads)


def stands_after_loop(site: Site, inside: Site) -> bool:
    """Whether a line follows the innermost loop around another, in the same function."""
    tree = _tree(inside.file) if is_user_file(inside.file) else None
    ends = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, (ast.For, ast.While))
        and node.lineno <= inside.line <= (node.end_lineno or node.lineno)
    ]
    same = _function_around(site) is _function_around(inside)
    return same and bool(ends) and site.line > max(ends)[1]


def _statements(files: Iterable[str]) -> Iterator[tuple[str, ast.stmt]]:
    for file in dict.fromkeys(files):
        tree = _tree(file) if is_user_file(file) else None
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.stmt):
                yield file, node


@functools.lru_cache(maxsize=32)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None  # a notebook's magic, or a file that has changed since
