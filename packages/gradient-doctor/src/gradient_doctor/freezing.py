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
