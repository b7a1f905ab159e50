"""Places to write to, tried before anything is computed.

An hour of computing that ends in "Permission denied" is an hour lost. So every folder that a
command will write into is made, a file is written there and removed, and what was made for that is
removed again. Without torch: a wrong path is refused at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from entropy_experiments.input_errors import InputError


def try_folder(folder: str | Path) -> None:
    """Raise OSError or InputError, with the path, if nothing can be written below `folder`."""
    folder = Path(folder).expanduser()
    made: list[Path] = []
    try:
        for place in (*reversed(folder.parents), folder):
            if not place.exists():
                place.mkdir()
                made.append(place)
        if not folder.is_dir():
            raise InputError(
                f"{folder} is a file; expected a folder to write into. Choose another place."
            )
        trial = folder / f".{os.getpid()}.trial"
        try:
            with open(trial, "wb") as file:
                file.write(b"trial")
        finally:
            trial.unlink(missing_ok=True)
    finally:
        for place in reversed(made):
            place.rmdir()


def try_file(path: str | Path) -> None:
    """The same of the folder that a file is for."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise IsADirectoryError(21, os.strerror(21), str(path))
    try_folder(path.parent)


def try_outputs(folders: Iterable[str | Path | None], files: Iterable[str | Path | None]) -> None:
    """All of them; None: nothing is written there."""
    for folder in folders:
        if folder is not None:
            try_folder(folder)
    for path in files:
        if path is not None:
            try_file(path)
