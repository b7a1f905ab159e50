"""Where a custom autograd Function says what its gradient is."""

from __future__ import annotations

import ast
from typing import Any

from gradient_doctor.findings import Site
from gradient_doctor.sites import is_user_file
from gradient_doctor.slips import returns_of


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


def _gives_none(node: ast.Return) -> bool:
    inside = [] if node.value is None else ast.walk(node.value)
    return not inside or any(isinstance(n, ast.Constant) and n.value is None for n in inside)
