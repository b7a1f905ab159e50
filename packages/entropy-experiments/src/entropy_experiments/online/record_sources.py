"""Prompts and reward functions of a training, as its record holds them.

A line of prompts/train.jsonl or prompts/eval.jsonl is a row of the dataset and `_prompt_ids`, the
tokens that training makes of its prompt; columns that JSON cannot hold (images, say) are left out
and named. A reward function is recorded by where it can be imported from, or by why it cannot.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from entropy_experiments.artifacts import sha256, write_whole
from entropy_experiments.checkpoints.training_record import (
    PromptSet,
    RecordedPrompts,
    RecordedRewards,
    RewardSource,
)
from entropy_experiments.online.evaluation_rollouts import chosen_rows

IDS = "_prompt_ids"
MOST = 20_000
"""Rows of a set that are kept; of a larger one, so many chosen by chance."""
SCRIPT = "__main__"


def write_prompts(
    folder: Path, data: Mapping[str, Any], ids_of: Callable[[Any], Sequence[int]]
) -> RecordedPrompts:
    """Rows of each set as a file, with the tokens of their prompts; the record's entry."""
    sets: dict[str, PromptSet] = {}
    dropped: set[str] = set()
    for name, rows in data.items():
        if rows is None or not hasattr(rows, "__len__"):
            continue
        lines, left_out = _lines(rows, ids_of)
        dropped |= left_out
        content = "".join(line + "\n" for line in lines).encode()
        write_whole(_make_folder(folder) / f"{name}.jsonl", content)
        digest = hashlib.sha256(content).hexdigest()
        sets[name] = {"rows": len(lines), "of": len(rows), "sha256": digest}
    messages = [_asks_in_messages(rows) for name, rows in data.items() if name in sets]
    entry: RecordedPrompts = {
        "sets": sets,
        "dropped": sorted(dropped),
        "messages": any(messages),
    }
    if not sets:
        entry["why_not"] = "training drew its prompts from a stream, which was not recorded"
    return entry


def _asks_in_messages(rows: Any) -> bool:
    return len(rows) > 0 and not isinstance(rows[0]["prompt"], str)


def _lines(rows: Any, ids_of: Callable[[Any], Sequence[int]]) -> tuple[list[str], set[str]]:
    chosen = range(len(rows))
    if len(rows) > MOST:
        chosen = sorted(chosen_rows(len(rows), MOST, seed=0, step=0))
    lines, dropped = [], set[str]()
    for i in chosen:
        row, kept = rows[i], {}
        for name, value in row.items():
            try:
                kept[name] = json.loads(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError):
                dropped.add(name)
        # One by one: a tokenizer's padding must not join the prompts.
        kept[IDS] = [int(t) for t in ids_of(row["prompt"])]
        lines.append(json.dumps(kept, ensure_ascii=False))
    return lines, dropped


def _make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def rewards_entry(functions: list[Any], names: list[str], weights: Any = None) -> RecordedRewards:
    """Reward functions as the record holds them; without names, under their own."""
    names = _distinct(names or [getattr(f, "__name__", type(f).__name__) for f in functions])
    return {
        "functions": [
            reward_source(name, function) for name, function in zip(names, functions, strict=True)
        ],
        "weights": [1.0] * len(names) if weights is None else [float(w) for w in weights],
    }


def _distinct(names: list[str]) -> list[str]:
    """Two functions of one name get numbers: results are kept by name."""
    return [
        name if names.count(name) == 1 else f"{name}_{names[:i].count(name)}"
        for i, name in enumerate(names)
    ]


def reward_source(label: str, function: Any) -> RewardSource:
    """Where `function`, which training calls `label`, can be imported from; or why it cannot."""

    def not_importable(why: str) -> RewardSource:
        return {"name": label, "why_not": why}

    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not (inspect.isfunction(function) or inspect.iscoroutinefunction(function)):
        kind = type(function).__name__
        return not_importable(
            f"it is a {kind}, and only a function of a module can be imported again"
        )
    if module is None or name is None or "<" in name or "." in name:
        return not_importable(
            f"{name} is not defined at the top of a module, so nothing can import it"
        )
    if getattr(sys.modules.get(module), name, None) is not function:
        return not_importable(f"{module} has another object under the name {name}")
    source = inspect.getsourcefile(function)
    if source is None or not Path(source).is_file():
        return not_importable(f"{module} has no source file")
    file = Path(source).resolve()
    if module == SCRIPT and (statement := _acts(file)):
        return not_importable(
            f"it is defined in the script {file.name}, and importing that would run its line "
            f"{statement}; put it into a module of its own, or the rest of the script under "
            "`if __name__ == '__main__':`"
        )
    return {
        "name": label,
        "module": None if module == SCRIPT else module,
        "function": name,
        "file": str(file),
        "sha256": sha256(file),
    }


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
