"""Where a trainer's reward functions can be imported from again, or why they cannot."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

from entropy_experiments.artifacts import sha256

SCRIPT = "__main__"


def recorded_rewards(trainer: Any) -> dict[str, Any]:
    """The record's entry: functions in the trainer's order, and their weights."""
    names: list[str] = list(getattr(trainer, "reward_func_names", ()))
    functions = list(trainer.reward_funcs)
    names = _distinct(names or [getattr(f, "__name__", type(f).__name__) for f in functions])
    weights = getattr(trainer, "reward_weights", None)
    return {
        "functions": [
            {"name": name, **reward_path(function)}
            for name, function in zip(names, functions, strict=True)
        ],
        "weights": [1.0] * len(names) if weights is None else [float(w) for w in weights],
    }


def _distinct(names: list[str]) -> list[str]:
    """Two functions of one name get numbers: results are kept by name."""
    return [
        name if names.count(name) == 1 else f"{name}_{names[:i].count(name)}"
        for i, name in enumerate(names)
    ]


def reward_path(function: Any) -> dict[str, Any]:
    """module, function, file and sha256; or `why_not`."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not (inspect.isfunction(function) or inspect.iscoroutinefunction(function)):
        kind = type(function).__name__
        return _unknown(f"it is a {kind}, and only a function of a module can be imported again")
    if module is None or name is None or "<" in name or "." in name:
        return _unknown(f"{name} is not defined at the top of a module, so nothing can import it")
    if getattr(sys.modules.get(module), name, None) is not function:
        return _unknown(f"{module} has another object under the name {name}")
    source = inspect.getsourcefile(function)
    if source is None or not Path(source).is_file():
        return _unknown(f"{module} has no source file")
    file = Path(source).resolve()
    if module == SCRIPT and (statement := _acts(file)):
        return _unknown(
            f"it is defined in the script {file.name}, and importing that would run its line "
            f"{statement}; put it into a module of its own, or the rest of the script under "
            "`if __name__ == '__main__':`"
        )
    return {
        "module": None if module == SCRIPT else module,
        "function": name,
        "file": str(file),
        "sha256": sha256(file),
    }


def _unknown(why: str) -> dict[str, Any]:
    return {"why_not": why}


def _acts(file: Path) -> int | None:
    """The first line of a script that does more than define; None: importing it is harmless."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(
            statement,
            ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
        ):
            continue
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if text or (isinstance(statement, ast.If) and _is_main(statement.test)):
            continue
        plain = isinstance(statement, ast.Assign | ast.AnnAssign) and not any(
            isinstance(part, ast.Call | ast.Await) for part in ast.walk(statement)
        )
        if not plain:
            return statement.lineno
    return None


def _is_main(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
    )
