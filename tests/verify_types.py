"""Every exported name has a type that is known whole: `pyright --verifytypes`, name by name.

    python tests/verify_types.py [PACKAGE ...]        # part of `make types`

pyright looks at all public modules. What is promised are the names that a package exports, and all
that their types are made of: a class is known when its members are. Other modules are counted, not
judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGES = ("entropy_experiments", "gradient_doctor", "arc_refine")


def report_of(package: str) -> dict[str, Any]:
    """What pyright says about the types of a package that is installed here."""
    scripts = Path(sys.executable).parent
    # It takes the first Python of PATH, and a folder beside it for the package itself.
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [scripts / "pyright", "--verifytypes", package, "--ignoreexternal", "--outputjson"]
    with tempfile.TemporaryDirectory() as nowhere:
        done = subprocess.run(
            list(map(str, command)), cwd=nowhere, env=environment, capture_output=True, text=True
        )
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"pyright gave no report:\n{done.stdout}{done.stderr}") from None


def unknown(package: str, names: list[str], report: dict[str, Any]) -> dict[str, list[str]]:
    """By exported name whose type is not known: why, as far as pyright says it."""
    symbols = {}
    for symbol in report["typeCompleteness"]["symbols"]:
        for name in (symbol["name"], *symbol.get("alternateNames", ())):
            symbols[name] = symbol
    problems = {}
    for name in names:
        symbol = symbols.get(f"{package}.{name}")
        if symbol is None:
            problems[name] = ["pyright does not see it: is it in __init__.pyi?"]
        elif not symbol["isTypeKnown"]:
            below = [s for s in symbols.values() if f".{name}." in s["name"]]
            problems[name] = [
                f"{one['name']}: {' '.join(said['message'].split())}"
                for one in [symbol, *below]
                if not one["isTypeKnown"]
                for said in one["diagnostics"]
            ] or ["a type that it is made of is not known whole"]
    return problems


def main(packages: list[str]) -> int:
    failed = False
    for package in packages:
        names = list(import_module(package).__all__)
        report = report_of(package)
        problems = unknown(package, names, report)
        whole = report["typeCompleteness"]["completenessScore"]
        print(
            f"{package}: {len(names) - len(problems)} of {len(names)} exported names have types "
            f"that are known whole; of all public symbols {whole:.1%}"
        )
        for name, why in problems.items():
            failed = True
            print(f"  {name}", *(f"    {line}" for line in why), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(PACKAGES)))
