"""The prompts that a trainer draws from, with every column, as JSON lines beside the record.

    prompts/train.jsonl, prompts/eval.jsonl     a row of the dataset per line, and `_prompt_ids`:
                                                the tokens that the trainer makes of its prompt

Columns that JSON cannot hold (images, say) are left out and named.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from entropy_experiments.artifacts import write_whole
from entropy_experiments.online.drawing import chosen_rows

PROMPTS = "prompts"
IDS = "_prompt_ids"
MOST = 20_000
"""Rows of a set that are kept; of a larger one, so many chosen by chance."""


def write_prompts(folder: Path, trainer: Any) -> dict[str, Any]:
    """The record's entry: {"sets": {name: {rows, of, sha256}}, "dropped": [columns],
    "messages": whether prompts are conversations, put in the chat template}."""
    data = {"train": trainer.train_dataset, "eval": trainer.eval_dataset}
    if isinstance(data["eval"], dict):  # several evaluation sets: the first, as the probe does
        data["eval"] = next(iter(data["eval"].values()), None)
    sets: dict[str, Any] = {}
    dropped: set[str] = set()
    for name, rows in data.items():
        if rows is None or not hasattr(rows, "__len__"):
            continue
        lines, left_out = _lines(trainer, rows)
        dropped |= left_out
        content = "".join(line + "\n" for line in lines).encode()
        write_whole(_made(folder) / f"{name}.jsonl", content)
        digest = hashlib.sha256(content).hexdigest()
        sets[name] = {"rows": len(lines), "of": len(rows), "sha256": digest}
    messages = [_asks_in_messages(rows) for name, rows in data.items() if name in sets]
    entry: dict[str, Any] = {
        "sets": sets,
        "dropped": sorted(dropped),
        "messages": any(messages),
    }
    if not sets:
        entry["why_not"] = "training drew its prompts from a stream, which was not recorded"
    return entry


def _asks_in_messages(rows: Any) -> bool:
    return len(rows) > 0 and not isinstance(rows[0]["prompt"], str)


def _lines(trainer: Any, rows: Any) -> tuple[list[str], set[str]]:
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
        kept[IDS] = [int(t) for t in trainer._tokenize_prompts([row["prompt"]])[0][0]]
        lines.append(json.dumps(kept, ensure_ascii=False))
    return lines, dropped


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
