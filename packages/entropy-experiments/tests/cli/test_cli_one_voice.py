"""Under torchrun, what has nothing to deal out is done by rank 0: one voice, one file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from entropy_experiments.cli import app

pytestmark = pytest.mark.contract

TWO = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
TWO |= {"TORCHELASTIC_RUN_ID": "none"}
COMMANDS = [
    ["config", "template", "--out", "{out}"],
    ["config", "schema"],
    ["config", "check", "test_deltaH1"],
    ["config", "check", "no_such_file.yaml"],
    ["report", "no_such_run"],
    ["report", "--no-such-option"],
    ["arc", "eval", "no_such_run"],
    ["doctor", "--entropy", "no_such_module:entropy"],
    ["train", "--dry-run", "--config", "entropy_probe_test_optimized"],
    ["train", "--dry-run", "--set", "no_such_key=1"],
]


def invoke(words, rank=None):
    env = {} if rank is None else {**TWO, "RANK": str(rank)}
    return CliRunner().invoke(app, words, env=env)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_rank_0_speaks_and_the_others_leave(tmp_path, words):
    alone, first, other = (
        (tmp_path / name, invoke([word.format(out=tmp_path / name) for word in words], rank))
        for name, rank in (("alone", None), ("first", 0), ("other", 1))
    )
    assert (other[1].exit_code, other[1].output) == (0, "")
    assert not other[0].exists()
    assert first[1].exit_code == alone[1].exit_code  # of an error, too
    assert first[1].output
    assert first[0].exists() == alone[0].exists()


def test_the_sizes_of_a_training_are_those_of_all_ranks():
    words = ["train", "--dry-run", "--config", "entropy_probe_test_optimized"]
    assert "ranks 1," in invoke(words).stdout
    assert "ranks 2," in invoke(words, 0).stdout


ENDS = """
import atexit, sys
from entropy_experiments.cli.job import leaving

class Last:
    def __del__(self):
        print("the interpreter shut down")

last = Last()
atexit.register(print, "libraries cleaned up")
with leaving():
    print("done", end=" ")  # in a buffer until somebody flushes it
    sys.exit(3)
"""


@pytest.mark.parametrize(("rank", "shut_down"), [(None, True), ("0", False), ("1", False)])
def test_a_rank_leaves_before_the_interpreter_shuts_down(rank, shut_down):
    """A thread of gloo's that releases a tensor during the shutdown aborts the process."""
    env = {**os.environ, **TWO, **({} if rank is None else {"RANK": rank})}
    done = subprocess.run(
        [sys.executable, "-c", ENDS], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "done libraries cleaned up" in done.stdout
    assert ("the interpreter shut down" in done.stdout) == shut_down
