"""Does an entropy or log-prob function compute what its name says? See check.py.

`check_entropy("module:function")` or `check_entropy(function)` gives a `Conformance`;
`main_entropy` is the command line: 0 passed, 3 wrong somewhere, 2 the function cannot be used.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gradient_doctor.conformance.check import check_entropy
from gradient_doctor.conformance.signatures import TargetError
from gradient_doctor.conformance.text import Case, Conformance


def main_entropy(target: str, json_path: str | None = None) -> int:
    try:
        check = check_entropy(target)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(check.text())
    if json_path is not None:
        try:
            Path(json_path).write_text(check.to_json() + "\n")
        except OSError as error:
            print(f"error: cannot write {json_path} ({error}). Name a file in a folder that "
                  "exists.", file=sys.stderr)  # fmt: skip
            return 2
    return 0 if check.passed else 3


__all__ = ["Case", "Conformance", "TargetError", "check_entropy", "main_entropy"]
