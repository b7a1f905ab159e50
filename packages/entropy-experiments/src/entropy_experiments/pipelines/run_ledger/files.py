"""The files of a run's ledger, made of one finished step after the other.

A finished step is stored as the parquet bytes of its token rows and a few facts (`StoredStep`).
The tables are written by going through them once: a row group per step, sums by prompt and by
text on the way. So memory does not grow with the number of steps, and the bytes depend on the
stored steps alone, however often the command was killed between them.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from entropy_experiments.artifacts import described, json_bytes, sha256, write_changed
from entropy_experiments.attribution.token_classes import token_class
from entropy_experiments.results import RUN_LEDGER, RunLedgerResult
from entropy_experiments.results.run_ledger import (
    LAYER_TABLE,
    MANIFEST_FILE,
    PROMPT_TABLE,
    SUMMARY_FILE,
    TABLES,
    TEXT_TABLE,
    TOKEN_TABLE,
)

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

HALVES = ("dH", "dH_a", "dH_b", "dR", "dR_a", "dR_b")


@dataclass(frozen=True, kw_only=True)
class StoredStep:
    """One step's token rows and what is added up beside them."""

    tokens: bytes
    """Parquet, with the columns of run_ledger.parquet."""
    prompts: Mapping[str, str]
    """Text by prompt id."""
    solved: Mapping[str, Sequence[int]] | None
    """By prompt id: (rollouts with a full reward, rollouts); None: not known."""
    layers: Mapping[str, Sequence[Any]]
    """Columns of by_layer.parquet."""
    special: Sequence[str] = ()
    """Texts of special tokens."""


@dataclass
class _Sum:
    count: int = 0
    rollouts: int = 0
    parts: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(HALVES))

    def add(self, name: str, value: float) -> None:
        self.parts[name] = (self.parts[name] or 0.0) + value

    @property
    def sums(self) -> dict[str, float | None]:
        parts = self.parts
        return {
            "dH": parts["dH"],
            "dH_stderr": _apart(parts["dH_a"], parts["dH_b"]),
            "dR": parts["dR"],
            "dR_stderr": _apart(parts["dR_a"], parts["dR_b"]),
        }


def _apart(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else abs(a - b)


def arrow_schema(name: str) -> pyarrow.Schema:
    """Of one of `results.TABLES`."""
    import pyarrow

    kinds = {"int64": pyarrow.int64(), "double": pyarrow.float64(), "string": pyarrow.string()}
    return pyarrow.schema([(column.name, kinds[column.kind]) for column in TABLES[name]])


def table_bytes(name: str, *parts: Mapping[str, Any]) -> bytes:
    """Parquet of one table, with exactly its columns, a row group a part; NaN becomes null."""
    buffer = io.BytesIO()
    with _writer(name, buffer) as write:
        for columns in parts:
            write(columns)
    return buffer.getvalue()


@contextmanager
def _writer(name: str, where: Any) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    schema = arrow_schema(name)
    with pyarrow.parquet.ParquetWriter(where, schema) as writer:

        def write(columns: Mapping[str, Any]) -> None:
            arrays = [
                pyarrow.array(columns[field.name], type=field.type, from_pandas=True)
                for field in schema
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

        yield write


def write_run_ledger(
    folder: Path, key: str, summary: RunLedgerResult, steps: Iterable[StoredStep]
) -> None:
    """All files of a finished run directory; the manifest last.

    Args:
        folder: Made if missing.
        key: What decides the numbers.
        summary: summary.json.
        steps: In the order of the run; each is held while it is written, and no longer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / MANIFEST_FILE
    manifest.unlink(missing_ok=True)  # never an old one beside new files
    prompts: dict[str, _Sum] = {}
    texts: dict[str, _Sum] = {}
    prompt_texts: dict[str, str] = {}
    solved: dict[str, list[int]] = {}
    special: set[str] = set()
    partials = {name: folder / f".{name}.{os.getpid()}.partial" for name in TABLES}
    try:
        with (
            _writer(TOKEN_TABLE, partials[TOKEN_TABLE]) as write_tokens,
            _writer(LAYER_TABLE, partials[LAYER_TABLE]) as write_layers,
        ):
            for step in steps:
                columns = _columns(step.tokens)
                write_tokens(columns)
                write_layers(step.layers)
                prompt_texts.update(step.prompts)
                special.update(step.special)
                _add(prompts, columns, "prompt")
                _add(texts, columns, "text")
                for prompt, (full, of) in (step.solved or {}).items():
                    before = solved.setdefault(prompt, [0, 0])
                    before[0] += full
                    before[1] += of
        with _writer(PROMPT_TABLE, partials[PROMPT_TABLE]) as write:
            write(_prompt_columns(prompts, prompt_texts, solved))
        with _writer(TEXT_TABLE, partials[TEXT_TABLE]) as write:
            write(_text_columns(texts, special))
        for name, partial in partials.items():
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, folder / name)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
    content = json_bytes(summary)
    write_changed(folder / SUMMARY_FILE, content)
    files = {SUMMARY_FILE: described(content)} | {
        name: {"sha256": sha256(folder / name), "bytes": (folder / name).stat().st_size}
        for name in TABLES
    }
    write_changed(manifest, json_bytes({**RUN_LEDGER.stamp, "key": key, "files": files}))


def _columns(data: bytes) -> dict[str, Any]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(io.BytesIO(data))
    return {name: table.column(name) for name in table.column_names}


def _add(sums: dict[str, _Sum], columns: Mapping[str, Any], by: str) -> None:
    """Add a step's tokens to the sums of their group."""
    names, index = np.unique(
        np.asarray(columns[by].to_pylist(), dtype=object).astype(str), return_inverse=True
    )
    if not len(index):
        return
    groups = [sums.setdefault(str(name), _Sum()) for name in names]
    for group, count in zip(groups, np.bincount(index).tolist(), strict=True):
        group.count += count
    rollout = columns["rollout"].to_numpy()
    for number, group in enumerate(groups):
        group.rollouts += len(np.unique(rollout[index == number])) if by == "prompt" else 0
    for name in HALVES:
        if columns[name].null_count:
            continue
        totals = np.bincount(index, weights=columns[name].to_numpy(), minlength=len(names))
        for group, total in zip(groups, totals.tolist(), strict=True):
            group.add(name, total)


def _ordered(sums: Mapping[str, _Sum]) -> list[tuple[str, _Sum]]:
    """The dearest first: most entropy lost."""
    return sorted(sums.items(), key=lambda item: (item[1].parts["dH"] or 0.0, item[0]))


def _prompt_columns(
    sums: Mapping[str, _Sum], texts: Mapping[str, str], solved: Mapping[str, list[int]]
) -> dict[str, list[Any]]:
    rows = [
        {
            "prompt": prompt,
            "prompt_text": texts.get(prompt, ""),
            "solved": solved[prompt][0] / solved[prompt][1] if prompt in solved else None,
            "rollouts": group.rollouts,
            "tokens": group.count,
            **group.sums,
        }
        for prompt, group in _ordered(sums)
    ]
    return _transposed(PROMPT_TABLE, rows)


def _text_columns(sums: Mapping[str, _Sum], special: set[str]) -> dict[str, list[Any]]:
    rows = [
        {
            "text": text,
            "class": token_class(text, special=text in special),
            "count": group.count,
            **group.sums,
        }
        for text, group in _ordered(sums)
    ]
    return _transposed(TEXT_TABLE, rows)


def _transposed(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {column.name: [row[column.name] for row in rows] for column in TABLES[name]}


def prompt_id(tokens: Sequence[int]) -> str:
    """The same prompt has the same id in every step and every run."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]
