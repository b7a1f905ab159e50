"""kill -9 at fifty random instants of `run` and `influence`: the same command, the same bits.

Ten kills in a row, each of a process that goes on where the one before was killed, then one that is
left alone; five times. Every process has one thread, so that sums are added in the same order.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entropy_experiments.sampling.whole_files import hashed_body

pytestmark = pytest.mark.invariant

SMALL = ("batch_config.B_E=8", "generation.gen_batch_size=4")
DRAWN = ("update.batch=drawn", "batch_config.B_U=2", "batch_config.G=4")
COMMANDS = {
    "run": ("run", *SMALL, *DRAWN),
    "influence": ("influence", *SMALL, *DRAWN, "influence.measured_rollouts=3"),
}
FOLDERS, KILLS = 5, 10
PATIENCE = 600
"""Seconds until a hang is a failure."""


def started(verb: str, out: Path) -> subprocess.Popen:
    name, *settings = COMMANDS[verb]
    options = [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen(
        [sys.executable, "-m", "entropy_experiments.cli", name, "--out", str(out), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(verb: str, out: Path) -> None:
    child = started(verb, out)
    try:
        _, stderr = child.communicate(timeout=PATIENCE)
    finally:
        child.kill()
    assert child.returncode == 0, stderr


def kill_after(seconds: float, verb: str, out: Path) -> bool:
    """Whether it was still at work."""
    child = started(verb, out)
    try:
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=PATIENCE)
    finally:
        child.kill()
    return child.returncode == -signal.SIGKILL


def contents(out: Path) -> dict[str, object]:
    """All files; without how long things took, when, and the folder's own name."""
    found: dict[str, object] = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        name, data = path.relative_to(out).as_posix(), path.read_bytes()
        if path.suffix in (".stage", ".unit"):
            hashed_body(path, data)
            found[name] = "whole"
        elif name.startswith("logs/"):
            continue  # one for every command, named by its time
        elif name in ("results.json", "summary.json"):
            dropped = ("timing", "timings", "log_path", "plan", "run_directory")
            found[name] = {k: v for k, v in json.loads(data).items() if k not in dropped}
        elif name == "manifest.json":
            said = json.loads(data)
            timed = {"summary.json": None, "config.yaml": None}
            found[name] = {**said, "digest": None, "files": {**said["files"], **timed}}
        elif name not in ("config.yaml", "run.json"):
            found[name] = data
    return found


@pytest.fixture(scope="module", params=COMMANDS)
def undisturbed(request, tmp_path_factory):
    """(verb, what it leaves, seconds it took)."""
    out = tmp_path_factory.mktemp(request.param) / "out"
    begun = time.monotonic()
    finish(request.param, out)
    return request.param, contents(out), time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("folder", range(FOLDERS))
def test_killed_ten_times(undisturbed, tmp_path, folder):
    verb, wanted, seconds = undisturbed
    out, draw = tmp_path / "out", random.Random(folder)
    killed = sum(kill_after(draw.uniform(0, seconds), verb, out) for _ in range(KILLS))
    assert killed >= KILLS // 2
    finish(verb, out)
    found = contents(out)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == value, name
    assert not list(out.rglob("*.partial"))
