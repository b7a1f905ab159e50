"""Scripts and our commands in an environment of their own; nothing reaches the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkout import ROOT, SOURCES
from wild.environments import environment

TESTS = (ROOT / "packages" / "entropy-experiments" / "tests", ROOT / "tests")
SCRIPTS = Path(__file__).parent / "scripts"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
PATIENCE = 600
"""Seconds; a hang is an error of the test, not an endless test."""


def run(python: Path | str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """`python` on one thread, with this checkout's packages and the tests' oracles."""
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (*SOURCES, *TESTS)))}
    return subprocess.run(
        [str(python), *map(str, arguments)],
        env={**os.environ, **OFFLINE, **paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def run_script(name: str, script: str, folder: Path) -> dict[str, Any]:
    """What `script` writes to the file that it gets as its only argument."""
    result = folder / "result.json"
    done = run(environment(name), SCRIPTS / script, result)
    assert done.returncode == 0, f"{script} in {name}:\n{done.stderr[-4000:]}"
    return json.loads(result.read_text())


def entropy_probe(
    *arguments: Any, python: Path | str = sys.executable
) -> subprocess.CompletedProcess[str]:
    return run(python, "-m", "entropy_experiments.cli", *arguments)
