"""Layers that a module keeps where torch does not look for them: in a list, a dict, an object.

`self.layers = [nn.Linear(4, 4)]` registers nothing. The layer may be made anywhere (an argument, a
helper); the statement to change is the one that puts it into a plain attribute.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from gradient_doctor.findings import Site
from gradient_doctor.sites import is_user_file
from gradient_doctor.slips import assigned_attribute, tree_of

_DEPTH = 4  # a dict of lists of objects with layers
_MANY = 2000  # things in one attribute
_PRIVATE = {"_parameters", "_buffers", "_modules", "_backward_hooks", "_forward_hooks"}


def kept_in(parameter: Tensor, modules: Iterable[nn.Module]) -> Site | None:
    """The statement that gave the first module with this parameter in a plain attribute to it."""
    for module in modules:
        for name, value in vars(module).items():
            if name in _PRIVATE or value is None or isinstance(value, (bool, int, float, str)):
                continue
            if any(part is parameter for part in _tensors(value, set(), _DEPTH)):
                return _assignment(module, name)
    return None


def _tensors(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or len(seen) > _MANY or not depth:
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from _tensors(part, seen, depth - 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        # of a module all parameters, and those of its own plain attributes
        inner = [v for m in value.modules() for n, v in vars(m).items() if n not in _PRIVATE]
        return [*value.parameters(), *(v for v in inner if isinstance(v, (list, tuple, dict)))]
    if isinstance(value, dict):
        return list(value.values())[:_MANY]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)[:_MANY]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return [_content(cell) for cell in value.__closure__ or ()]
    if isinstance(value, (type, ModuleType)) or not _is_users(type(value)):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not filled yet


def _is_users(kind: type) -> bool:
    return is_user_file(_file_of(kind))


def _file_of(kind: type) -> str:
    """Where a class stands: its methods know, for a script's module is another one by now."""
    codes = (getattr(member, "__code__", None) for member in vars(kind).values())
    file = next((code.co_filename for code in codes if code is not None), None)
    if file is not None and not file.startswith("<"):
        return file
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<unknown>"


def _assignment(module: nn.Module, name: str) -> Site | None:
    kinds = [kind for kind in type(module).__mro__ if _is_users(kind)]
    for kind in kinds:
        file = _file_of(kind)
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                line = _assigned_in(node, name)
                if line is not None:
                    return Site(file, line)
    return assigned_attribute([_file_of(kind) for kind in kinds], {name})


def _assigned_in(owner: ast.ClassDef, name: str) -> int | None:
    """The first statement of a class that gives `self.name` something."""
    for node in ast.walk(owner):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        empty = isinstance(node.value, ast.Constant) and node.value.value is None
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and part.attr == name and not empty:
                    return node.lineno
    return None
