"""kill -9 during `entropy-probe influence`: the same command continues, and no bit is different.

The undisturbed run and the killed ones are processes of their own with one thread each, so that
sums are added in the same order.
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

pytestmark = pytest.mark.invariant

SMALLER = (
    *("update.batch=drawn", "batch_config.B_E=6", "batch_config.B_U=2", "batch_config.G=4"),
    *("influence.measured_rollouts=5", "influence.leave_one_out=[1]", "influence.confirm=true"),
    *('influence.what_if=["drop=negative"]', "generation.gen_batch_size=4"),
)
NOT_NUMBERS = ("summary.json", "config.yaml")
"""summary.json has timings, config.yaml the folder's own name."""


def started(out: Path) -> subprocess.Popen:
    options = [word for change in SMALLER for word in ("--set", change)]
    run = ["influence", "--config", "test_deltaH1", "--out", str(out), *options]
    return subprocess.Popen(
        [sys.executable, "-m", "entropy_experiments.cli", *run],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(out: Path) -> str:
    child = started(out)
    try:
        _, stderr = child.communicate(timeout=300)
    finally:
        child.kill()
    assert child.returncode == 0, stderr
    return stderr


def killed_when(out: Path, ready) -> bool:
    """Kill -9 as soon as `ready()`; False: it was finished before."""
    child = started(out)
    try:
        deadline = time.monotonic() + 300
        while not ready() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=60)
    finally:
        child.kill()
    return child.returncode == -signal.SIGKILL


def stages(out: Path) -> dict[str, tuple[int, bytes]]:
    found = (out / "stages").glob("*.stage")
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in found}


def numbers(out: Path) -> dict[str, bytes]:
    """Every array and table, bit by bit."""
    names = json.loads((out / "manifest.json").read_text())["files"]
    return {name: (out / name).read_bytes() for name in names if name not in NOT_NUMBERS}


def summary(out: Path) -> dict:
    found = json.loads((out / "summary.json").read_text())
    return {k: v for k, v in found.items() if k not in ("timings", "plan")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(folder, seconds it took)."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    begun = time.monotonic()
    finish(out)
    assert json.loads((out / "summary.json").read_text())["update"]["norms"]["gradient"] > 0
    return out, time.monotonic() - begun


def check(out: Path, undisturbed: Path) -> None:
    assert numbers(out) == numbers(undisturbed)
    assert summary(out) == summary(undisturbed)
    assert not list(out.rglob("*.partial"))


@pytest.mark.slow
def test_killed_twice_and_continued(undisturbed, tmp_path):
    reference, _ = undisturbed
    out = tmp_path / "run"
    assert killed_when(out, lambda: len(stages(out)) >= 2)
    assert not (out / "manifest.json").exists()
    first = stages(out)
    assert killed_when(out, lambda: len(stages(out)) >= len(first) + 3)
    kept = stages(out)
    assert {name: kept[name] for name in first} == first
    told = finish(out)
    assert "the optimizer step: kept from before" in told
    after = stages(out)
    assert {name: after[name] for name in kept} == kept, "a finished stage was computed again"
    assert len(after) > len(kept)
    check(out, reference)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(10))
def test_killed_at_a_random_moment(undisturbed, tmp_path, moment):
    reference, seconds = undisturbed
    out = tmp_path / "run"
    # From the first imports to the writing of the last file.
    until = time.monotonic() + random.Random(moment).uniform(0, seconds)
    killed_when(out, lambda: time.monotonic() >= until)
    finish(out)
    check(out, reference)


def test_what_a_killed_writer_left_is_swept_away(tmp_path):
    from entropy_experiments.pipelines.influence.store import RunDirectory

    run = RunDirectory(tmp_path)
    run.bind("0" * 64)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mine = tmp_path / f".tokens.parquet.{os.getpid()}.partial"
    theirs = tmp_path / f".tokens.parquet.{gone.pid}.partial"
    for path in (mine, theirs):
        path.write_bytes(b"half")
    run.bind("0" * 64)
    assert mine.exists()  # somebody is writing it
    assert not theirs.exists()
