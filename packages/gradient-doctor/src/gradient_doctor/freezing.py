"""Where was a parameter frozen? Seen in a traced step; else read from the source.

Between two phases no step is traced, and `p.requires_grad = False` is an assignment that nobody
sees. If one line of the program does such a thing, it is that line; among several, the one whose
surroundings share most words with the parameter's name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from torch import Tensor

from gradient_doctor.findings import Site
from gradient_doctor.registry import Registry
from gradient_doctor.sites import is_user_file
from gradient_doctor.slips import surroundings, tree_of

_WORD = re.compile(r"[a-z]+")


def frozen_line(registry: Registry, parameter: Tensor, also: Iterable[Site | None]) -> Site | None:
    """The line that switched requires_grad off; `also` are other lines of the same program."""
    seen = registry.frozen_at.get(parameter)
    if seen is not None:
        return seen
    births = [registry.birth(parameter), *map(registry.birth, registry.optimizers.values())]
    sites = [*(birth.site for birth in births if birth is not None), *also]
    files = dict.fromkeys(site.file for site in sites if site is not None)
    lines = [line for file in files if is_user_file(file) for line in freezing_lines(file)]
    if len(lines) < 2:
        return lines[0] if lines else None
    words = set(_WORD.findall(registry.name(parameter).lower())) - {"weight", "bias", "model"}
    shared = [len(words & set(_WORD.findall(surroundings(line).lower()))) for line in lines]
    best = [line for line, number in zip(lines, shared) if number == max(shared)]
    return best[0] if len(best) == 1 else None


def freezing_lines(file: str) -> list[Site]:
    """`p.requires_grad = False` and `module.requires_grad_(False)`; a variable counts as well."""
    tree = tree_of(file)
    lines: dict[int, None] = {}
    for node in ast.walk(tree) if tree is not None else ():
        value: ast.expr | None = None
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            value = node.value if node.targets[0].attr == "requires_grad" else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            arguments = [*node.args, *(word.value for word in node.keywords)]
            if node.func.attr == "requires_grad_" and arguments:
                value = arguments[0]
        if value is not None and not (isinstance(value, ast.Constant) and value.value is True):
            lines[value.lineno] = None
    return [Site(file, line) for line in sorted(lines)]


def never_thaws(line: Site) -> Site | None:
    """The `if p.requires_grad:` before `p.requires_grad = value`, in a function called with True.

    It skips what is frozen: the function can freeze, and the call with True does nothing.
    """
    tree = tree_of(line.file)
    for function in ast.walk(tree) if tree is not None else ():
        if not isinstance(function, ast.FunctionDef) or tree is None:
            continue
        for head in ast.walk(function):
            if not isinstance(head, ast.If) or not _asks(head.test):
                continue
            switched = [node for node in head.body if _switches(node, function)]
            if any(node.lineno == line.line for node in switched):
                return (
                    Site(line.file, head.lineno, function.name) if _thaws(tree, function) else None
                )
    return None


def _asks(test: ast.expr) -> bool:
    return isinstance(test, ast.Attribute) and test.attr == "requires_grad"


def _switches(node: ast.stmt, function: ast.FunctionDef) -> bool:
    """`p.requires_grad = value` with an argument of the function."""
    words = {word.arg for word in (*function.args.args, *function.args.kwonlyargs)}
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Name):
        return False
    target = node.targets[0]
    return (
        isinstance(target, ast.Attribute)
        and target.attr == "requires_grad"
        and (node.value.id in words)
    )


def _thaws(tree: ast.Module, function: ast.FunctionDef) -> bool:
    """Whether some call of the function has a True among its arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            arguments = [*node.args, *(word.value for word in node.keywords)]
            if name == function.name and any(
                isinstance(a, ast.Constant) and a.value is True for a in arguments
            ):
                return True
    return False
