"""How far does a reader walk? Our files and functions that one command enters.

    python tests/walk.py run --config quick_look
    python tests/walk.py --list influence --what-if drop=negative

Runs `entropy-probe` in this process under a profiler. A file counts when one of its functions was
called; a file that was only imported for its names is counted apart. Forked and spawned processes
are not seen.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from checkout import SOURCES


class Walk:
    """The code objects that a command entered."""

    def __init__(self) -> None:
        self.entered: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            self.entered.add(frame.f_code)

    def ours(self) -> list[tuple[Path, CodeType]]:
        """Entered code of the packages, by file; what dataclasses generate has no file."""
        codes = ((Path(code.co_filename), code) for code in self.entered)
        return [
            (file.relative_to(source), code)
            for file, code in codes
            for source in SOURCES
            if file.is_relative_to(source)
        ]


def is_function(code: CodeType) -> bool:
    """Not the body of a module or a class, which runs on import, nor a comprehension."""
    named = not code.co_name.startswith("<") or code.co_name == "<lambda>"
    return named and bool(code.co_flags & inspect.CO_OPTIMIZED)


def follow(arguments: list[str]) -> Walk:
    """Run `entropy-probe` with these arguments and record what it enters."""
    from entropy_experiments.cli import main

    walk = Walk()
    before = sys.argv
    sys.argv = ["entropy-probe", *arguments]
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        with contextlib.suppress(SystemExit):
            main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        sys.argv = before
    return walk


def main(arguments: list[str]) -> None:
    listed = arguments[:1] == ["--list"]
    if listed:
        arguments = arguments[1:]
    with tempfile.TemporaryDirectory() as folder:
        walk = follow([*arguments, "--out", f"{folder}/out", "--quiet"]).ours()
    functions = Counter(file for file, code in walk if is_function(code))
    imported = {file for file, _ in walk} - functions.keys()
    print(
        f"entropy-probe {' '.join(arguments)}: {len(functions)} files entered "
        f"({functions.total()} functions), {len(imported)} more imported"
    )
    if listed:
        for file, count in sorted(functions.items()):
            print(f"{count:5} {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
