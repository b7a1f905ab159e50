"""Where a custom autograd Function says what its gradient is."""

from __future__ import annotations

import ast
from typing import Any

from gradient_doctor.findings import Site
from gradient_doctor.sites import is_user_file
from gradient_doctor.slips import nodes_in, returns_of


def function_of(node: Any) -> Any:
    """The Function that a node of the graph belongs to; None for torch's own nodes."""
    return getattr(type(node), "_forward_cls", None)


def backward_line(kind: Any) -> Site | None:
    """The line of its return, if there is one; else of its head. None outside the user's code."""
    code = getattr(getattr(kind, "backward", None), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return None
    head = Site(code.co_filename, code.co_firstlineno, code.co_name)
    returns = returns_of(head)
    empty = [node for node in returns if _gives_none(node)]
    last = (empty or returns)[-1:]
    return Site(head.file, last[0].lineno, head.function) if last else head


def singular_line(kind: Any) -> Site | None:
    """The first line of its backward whose formula can overflow or divide by zero."""
    code = getattr(getattr(kind, "backward", None), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return None
    head = Site(code.co_filename, code.co_firstlineno, code.co_name)
    lines = [n.lineno for n in nodes_in(head) if isinstance(n, ast.expr) and _is_singular(n)]
    return Site(head.file, min(lines), head.function) if lines else None


def _is_singular(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Div):
            return not isinstance(node.right, ast.Constant)
        return isinstance(node.op, ast.Pow) and not isinstance(node.right, ast.Constant)
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in ("exp", "log", "sqrt", "rsqrt", "div", "reciprocal", "pow", "norm", "acos")


def _gives_none(node: ast.Return) -> bool:
    inside = [] if node.value is None else ast.walk(node.value)
    return not inside or any(isinstance(n, ast.Constant) and n.value is None for n in inside)
