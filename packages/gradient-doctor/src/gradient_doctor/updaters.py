"""Functions of a program that write an average or a copy of weights, and that nobody calls.

Read from the source alone: who reports one must have seen that what it should write stands still.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from gradient_doctor.sites import is_user_file
from gradient_doctor.slips import tree_of

_NAME = re.compile(r"update|ema|averag|avg|momentum|soft|polyak|sync|shadow|target|teacher", re.I)
_LISTS = {"parameters", "named_parameters", "state_dict", "buffers"}
_WRITES = {"mul_", "add_", "lerp_", "copy_", "load_state_dict"}
_TRAINS = {"backward", "step", "zero_grad", "save"}
_BASES = {"Module", "object", "ABC"}


@dataclass(frozen=True)
class Updater:
    """A function that nothing refers to, and the lines of its class (of itself outside one)."""

    file: str
    line: int
    name: str
    first: int
    last: int
    is_method: bool


def uncalled_updaters(files: Iterable[str]) -> list[Updater]:
    wanted = [file for file in dict.fromkeys(files) if is_user_file(file)]
    candidates = [updater for file in wanted for updater in _updaters(file)]
    if not candidates:
        return []
    used: set[str] = set()
    for file in {*wanted, *_loaded_files()}:
        used |= _names_used(file)
    return [updater for updater in candidates if updater.name not in used]


def copies_now_and_then(files: Iterable[str]) -> bool:
    """`if step % 1000 == 0: target.load_state_dict(...)`: the time for it may not have come."""
    for file in dict.fromkeys(files):
        tree = tree_of(file) if is_user_file(file) else None
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.If):
                continue
            every = any(isinstance(part, ast.Mod) for part in ast.walk(node.test))
            calls = (p.func for p in ast.walk(node) if isinstance(p, ast.Call))
            if every and any(getattr(call, "attr", "") == "load_state_dict" for call in calls):
                return True
    return False


def _updaters(file: str) -> list[Updater]:
    tree = tree_of(file)
    if tree is None:
        return []
    classes = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    owners = {id(f): c for c in classes.values() for f in c.body}
    updaters = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        if not all(_is_region(decorator) for decorator in node.decorator_list):
            continue  # a decorator may keep it
        owner = owners.get(id(node))
        if owner is not None and not all(_is_plain(base, classes) for base in owner.bases):
            continue  # a library may call it
        qualified = node.name if owner is None else f"{owner.name}.{node.name}"
        if _NAME.search(qualified) and _writes_weights(node):
            around = node if owner is None else owner
            last = around.end_lineno or around.lineno
            updaters.append(
                Updater(file, node.lineno, node.name, around.lineno, last, owner is not None)
            )
    return updaters


def _is_region(decorator: ast.expr) -> bool:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("no_grad", "inference_mode", "staticmethod", "classmethod")


def _is_plain(base: ast.expr, classes: dict[str, ast.ClassDef]) -> bool:
    name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
    return name in _BASES or name in classes


def _writes_weights(node: ast.FunctionDef) -> bool:
    called = {
        part.func.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
    }
    assigned = [
        target
        for part in ast.walk(node)
        if isinstance(part, ast.Assign) and any(isinstance(n, ast.BinOp) for n in ast.walk(part))
        for target in part.targets
    ]
    writes = bool(called & _WRITES) or any(
        isinstance(t, ast.Subscript) or (isinstance(t, ast.Attribute) and t.attr == "data")
        for t in assigned
    )
    return bool(called & _LISTS) and writes and not called & _TRAINS


def _names_used(file: str) -> set[str]:
    """Every name that is read somewhere, and every string: a method may be looked up by it."""
    used: set[str] = set()
    tree = tree_of(file)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            used |= {name.name for name in node.names}
    return used


def _loaded_files() -> list[str]:
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return [file for file in files if file is not None and is_user_file(file)]
