"""JSON lines with errors that name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entropy_experiments.input_errors import short


def read_jsonl(path: Path, expected: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank; `expected` says what one looks like."""
    if not path.is_file():
        raise FileNotFoundError(f"No such file: {path}. Expected lines like {expected}.")
    found = False
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except RecursionError:
                raise ValueError(
                    f"{path}:{number}: not JSON that can be read (nested too deeply). Expected a "
                    f"line like {expected}."
                ) from None
            except ValueError as error:
                raise ValueError(
                    f"{path}:{number}: not JSON ({short(error, 120)}). Expected a line like "
                    f"{expected}."
                ) from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{path}:{number}: got a JSON {type(record).__name__}; expected an object like "
                    f"{expected}."
                )
            found = True
            yield number, record
    if not found:
        raise ValueError(f"{path} has no lines. Expected at least one like {expected}.")
