"""Does importing a file train? A script often defines its reward beside `trainer.train()`.

Only read, never run: statements outside of functions, classes and `if __name__ == "__main__":`,
and the functions of the same file that they call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

TRAINS = ("train", "backward")
"""Methods: of a trainer, of a loss."""
_DEFINED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


class TrainingCall(NamedTuple):
    line: int
    """At the top of the file: where importing begins to train."""
    call: str


def training_on_import(file: Path) -> TrainingCall | None:
    """The first statement that importing this file would train by; None: there is none."""
    body = ast.parse(file.read_bytes()).body
    functions = {
        one.name: one for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for statement in body:
        if isinstance(statement, _DEFINED) or is_main_guard(statement):
            continue
        call = next(_training_calls([statement], functions, set()), None)
        if call is not None:
            return TrainingCall(statement.lineno, call)
    return None


def is_main_guard(statement: ast.stmt) -> bool:
    """`if __name__ == "__main__":`, in either order of its sides."""
    if not isinstance(statement, ast.If) or not isinstance(statement.test, ast.Compare):
        return False
    sides = (statement.test.left, *statement.test.comparators)
    return any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)


def _training_calls(
    nodes: Iterable[ast.AST],
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef],
    visited: set[str],
) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, _DEFINED):
            continue
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in TRAINS:
                yield f"{ast.unparse(called)}(...)"
            if isinstance(called, ast.Name) and called.id in functions.keys() - visited:
                visited.add(called.id)
                yield from _training_calls(functions[called.id].body, functions, visited)
        yield from _training_calls(ast.iter_child_nodes(node), functions, visited)
