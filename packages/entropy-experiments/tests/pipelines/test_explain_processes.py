"""`entropy-probe explain` as a process that is killed after every file it finishes.

`test_kills` kills it at random instants, `test_cli_ranks` runs it on two ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.test_cli_ranks import command, done
from oracles.recorded_run import explain_words, record_run

pytestmark = [pytest.mark.invariant, pytest.mark.slow]

STEPS = 6
PLACES = {"PYTHONPATH": str(Path(__file__).parents[1])}
"""Where the run's reward function is."""
MOST = 80
"""Kills until a run that makes no progress is a failure."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("explained")
    record_run(folder, STEPS)
    return folder


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory) -> Path:
    """Of one process; every second checkpoint is read, the steps between are replayed."""
    out = tmp_path_factory.mktemp("undisturbed") / "ledger"
    finished = done(command(*explain_words(run, out, "--every", "2")), **PLACES)
    assert finished.returncode == 0, finished.stderr
    return out


def files(out: Path) -> set[str]:
    """Finished ones; what is being written has another name."""
    places = (*out.glob("stages/*.stage"), *out.glob("*.parquet"), *out.glob("*.json"))
    return {path.relative_to(out).as_posix() for path in places}


def killed_after_the_next_file(words: list[str], out: Path) -> str | None:
    """Its name; None: the command finished."""
    before = files(out)
    child = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **PLACES},
    )
    try:
        while child.poll() is None:
            if new := files(out) - before:
                child.kill()  # SIGKILL
                return min(new)
            time.sleep(0.001)
        assert child.returncode == 0, child.stderr.read() if child.stderr else ""
        return None
    finally:
        child.kill()
        child.communicate()


def test_killed_after_every_file_it_leaves_the_same_bytes(run, undisturbed, tmp_path):
    out = tmp_path / "ledger"
    words = [sys.executable, "-m", "entropy_experiments.cli"]
    words += explain_words(run, out, "--every", "2")
    kills: list[str] = []
    while (name := killed_after_the_next_file(words, out)) is not None:
        kills.append(name.removeprefix("stages/").split(".")[0])
        assert len(kills) < MOST, kills
    # Between the two stages of a visit, within a replay, and while the tables are written.
    for kind in ("step_", "costate_", "state_", "replay_"):
        assert any(name.startswith(kind) for name in kills), kills
    assert len(kills) > 2 * (STEPS - 2)
    expected, left = (
        {path.relative_to(one): path.read_bytes() for path in one.rglob("*") if path.is_file()}
        for one in (undisturbed, out)
    )
    assert left.keys() == expected.keys()
    different = [str(name) for name, data in expected.items() if left[name] != data]
    assert not different
