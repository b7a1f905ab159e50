"""The line that made a layer with inplace=True: that is where the flag is written.

Layers without parameters are seen only when they are given to a parent, which may be lines later
(`parts.append(nn.ReLU(True))`, then `nn.Sequential(*parts)`). So the call is looked for in the
source, near the line that gave the layer to its parent.
"""

from __future__ import annotations

import ast

from torch import nn

from gradient_doctor.findings import Site
from gradient_doctor.registry import Registry
from gradient_doctor.sites import is_user_file
from gradient_doctor.slips import calls_in, statement_at


def is_in_place(module: nn.Module | None) -> bool:
    """Whether it is a layer of torch's that writes into its input."""
    return getattr(module, "inplace", False) is True and _is_torchs(module)


def made_at(registry: Registry, layer: nn.Module) -> Site | None:
    """The call with the flag; the line that gave the layer to its parent where there is none."""
    birth = registry.birth(layer)
    given = None if birth is None else birth.site
    if given is None or not is_user_file(given.file):
        return None
    calls = [call for call in calls_in(given.file) if _has_flag(call)]
    named = [call for call in calls if _name(call.func) == type(layer).__name__]
    lines = sorted(call.lineno for call in named or calls)
    statement = statement_at(given)
    end = given.line if statement is None else statement.end_lineno or given.line
    inside = [line for line in lines if given.line <= line <= end]
    if inside:
        place = _place(registry, layer, given)
        return Site(given.file, inside[min(place, len(inside) - 1)], given.function)
    before = [line for line in lines if line < given.line]
    if len(lines) == 1 or before:
        return Site(given.file, lines[0] if len(lines) == 1 else before[-1], given.function)
    return given


def _place(registry: Registry, layer: nn.Module, given: Site) -> int:
    """How many such layers the same statement has given to the same parent before."""
    parent = registry.parent(layer)
    same = []
    for child in parent.children() if parent is not None else ():
        birth = registry.birth(child)
        beside = birth is not None and birth.site is not None and birth.site.place == given.place
        if beside and type(child) is type(layer) and is_in_place(child):
            same.append(child)
    return next((k for k, child in enumerate(same) if child is layer), 0)


def _is_torchs(module: nn.Module | None) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _has_flag(call: ast.Call) -> bool:
    flags = [word.value for word in call.keywords if word.arg == "inplace"]
    values = [f.value for f in (flags or call.args) if isinstance(f, ast.Constant)]
    return any(value is True for value in values) or len(flags) > len(values)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
