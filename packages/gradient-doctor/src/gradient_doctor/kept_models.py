"""`best = model`: the best model is kept under a second name, and goes on learning.

Read from the source: a plain name, or a state_dict(), is kept behind a comparison in a loop, used
after it, and the model is not made anew in that loop, as a search over settings does.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from gradient_doctor.slips import tree_of

_KEPT = re.compile(r"best|saved|snapshot|backup|early", re.IGNORECASE)


@dataclass(frozen=True)
class Kept:
    """One such statement: the model's name, and whether its state_dict() is kept."""

    line: int
    model: str
    name: str
    is_state: bool


def kept_by_reference(file: str) -> list[Kept]:
    tree = tree_of(file)
    kept: list[Kept] = []
    for loop in ast.walk(tree) if tree is not None else ():
        if not isinstance(loop, (ast.For, ast.While)):
            continue
        for branch in _own(loop):
            if not isinstance(branch, ast.If) or not _compares(branch.test):
                continue
            for node in ast.walk(branch):
                one = _kept(node) if isinstance(node, ast.Assign) else None
                if one is None or one.model in _assigned(loop) or tree is None:
                    continue
                if _is_over(branch) or _is_replaced(branch, one):
                    continue
                if _used_later(tree, one, branch.end_lineno or branch.lineno):
                    kept.append(one)
    return kept


def _own(loop: ast.For | ast.While) -> list[ast.AST]:
    """What stands in a loop, and not in a loop inside of it."""
    nodes: list[ast.AST] = []
    pending: list[ast.AST] = [*loop.body]
    while pending:
        node = pending.pop()
        nodes.append(node)
        if not isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.ClassDef)):
            pending.extend(ast.iter_child_nodes(node))
    return nodes


def _is_over(branch: ast.If) -> bool:
    """Whether training ends with this branch: then the model stays as it is."""
    return any(isinstance(node, (ast.Break, ast.Return)) for node in branch.body)


def _is_replaced(branch: ast.If, kept: Kept) -> bool:
    """Whether the same branch gives the name something else right after, as a copy of it."""
    return any(
        isinstance(node, ast.Assign)
        and node.lineno > kept.line
        and any(_last(target) == kept.name for target in node.targets)
        for node in ast.walk(branch)
    )


def _compares(test: ast.expr) -> bool:
    return any(
        isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
        for node in ast.walk(test)
        if isinstance(node, ast.Compare)
        for op in node.ops
    )


def _kept(node: ast.Assign) -> Kept | None:
    name = _last(node.targets[0])
    value = node.value
    is_state = (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "state_dict"
    )
    owner = value.func.value if is_state else value  # pyright: ignore[reportAttributeAccessIssue]
    model = _last(owner)
    if name is None or model is None or not _KEPT.search(name) or _KEPT.search(model):
        return None
    return Kept(node.lineno, model, name, is_state)


def _last(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def _assigned(loop: ast.AST) -> set[str | None]:
    names: set[str | None] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign):
            names |= {_last(n) for t in node.targets for n in ast.walk(t)} - {None}
        elif isinstance(node, ast.For):
            names |= {_last(n) for n in ast.walk(node.target)}
    return names - {None, "self"}


def _used_later(tree: ast.Module, kept: Kept, end: int) -> bool:
    """Read somewhere below; what is saved at once, behind the same comparison, is right."""
    return any(
        isinstance(node, (ast.Name, ast.Attribute))
        and _last(node) == kept.name
        and isinstance(node.ctx, ast.Load)
        and node.lineno > end
        for node in ast.walk(tree)
    )
