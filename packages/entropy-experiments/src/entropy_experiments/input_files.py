"""Files from elsewhere, read within bounds: regular ones, of a size, not nested without end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entropy_experiments.input_errors import InputError, short

LARGEST_JSON = 256 * 2**20
"""Bytes; the log of a long training, in trainer_state.json, has tens of megabytes."""
LONGEST_PATH = 4096
DAMAGED = "The file was truncated or edited by hand: restore it, or use an earlier one"


def expand_path(path: Path | str, what: str) -> Path:
    """With ~ as the home folder; `what` names the option or key for the message."""
    if len(str(path)) > LONGEST_PATH or "\0" in str(path):
        got = f"of {len(str(path))} characters" if "\0" not in str(path) else "with a zero byte"
        raise InputError(f"{what} is a path {got}; expected that of a file or folder.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{what} is {str(path)!r}: {error} Write the folder out.") from error


def check_regular(path: Path, *, most: int | None = None) -> None:
    """Refuse what could be read for ever: a pipe, a device, or more than `most` bytes."""
    if not path.is_file():
        what = "not there" if not path.exists() else "no regular file"
        raise InputError(f"{path} is {what}; expected a file. Check the path.")
    if most is not None and path.stat().st_size > most:
        raise InputError(
            f"{path} has {path.stat().st_size:,} bytes; expected at most {most:,}. Is it the "
            "right file?"
        )


def refuse_special_files(folder: Path) -> None:
    """Refuse a folder with pipes, sockets or devices in it: a library would read them for ever."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InputError(
                f"{path} is no regular file; expected files and folders in a checkpoint. Remove it."
            )


def read_json_value(path: Path, *, advice: str = DAMAGED, most: int = LARGEST_JSON) -> Any:
    """Any JSON value; a file that is not JSON, or is made to exhaust a reader, is refused."""
    check_regular(path, most=most)
    return parse_json(path.read_bytes(), source=str(path), advice=advice)


def parse_json(data: bytes | str, *, source: str, advice: str = DAMAGED) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise InputError(
            f"{source} is not valid JSON that can be read (nested too deeply). {advice}."
        ) from None
    except ValueError as error:  # also: bytes that are no text, integers of thousands of digits
        reason = str(error).partition(";")[0]
        raise InputError(f"{source} is not valid JSON ({reason}). {advice}.") from error


def read_jsonl(path: Path, expected: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank; `expected` says what one looks like."""
    if not path.is_file():
        raise FileNotFoundError(f"No such file: {path}. Expected lines like {expected}.")
    any_line = False
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
            any_line = True
            yield number, record
    if not any_line:
        raise ValueError(f"{path} has no lines. Expected at least one like {expected}.")
