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


def surroundings(site: Site) -> str:
    """The line itself and the heads of the loops, conditions and `with`s that it stands in."""
    tree = _tree(site.file) if is_user_file(site.file) else None
    heads = [linecache.getline(site.file, site.line)]
    for node in ast.walk(tree) if tree is not None else ():
        compound = isinstance(node, (ast.For, ast.While, ast.If, ast.With))
        if compound and node.lineno < site.line <= (node.end_lineno or node.lineno):
            heads.append(linecache.getline(site.file, node.lineno))
    return "".join(heads)


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
