"""Offline commands under torchrun: the files of one process, a lost rank, a rank that fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.contract

PATIENCE = 600
"""Seconds until a hang is a failure; a busy machine takes minutes for what takes seconds."""
SMALL = (
    "batch_config.B_E=5",
    "batch_config.B_U=2",
    "batch_config.G=3",
    "update.batch=drawn",
    "generation.gen_batch_size=2",
    "memory_config.microbatch_size=2",
)
NOT_NUMBERS = ("timing", "timings", "log_path", "plan", "seconds", "folder")


def command(verb: str, *words: str, ranks: int = 1) -> list[str]:
    launch = [sys.executable]
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launch += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        launch += [f"--master-port={port}"]
    return [*launch, "-m", "entropy_experiments.cli", verb, *words]


def options(*changes: str) -> list[str]:
    return [word for change in (*SMALL, *changes) for word in ("--set", change)]


@contextmanager
def started(words: list[str], **env: str) -> Iterator[subprocess.Popen]:
    child = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    try:
        yield child
    finally:
        for worker in workers(child) if child.poll() is None else ():
            os.kill(worker, signal.SIGKILL)
        child.kill()


def done(words: list[str], **env: str) -> subprocess.CompletedProcess:
    with started(words, **env) as child:
        stdout, stderr = child.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(words, child.returncode, stdout, stderr)


def workers(child: subprocess.Popen) -> dict[int, int]:
    """{process: rank} of what torchrun has started."""
    found = {}
    for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
        said = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = next((word[5:] for word in said if word.startswith(b"RANK=")), None)
        if rank is not None:
            found[int(pid)] = int(rank)
    return found


def assert_same_numbers(one: Any, other: Any) -> None:
    """JSON, but for what a clock or a folder decides."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one.keys() - set(NOT_NUMBERS):
            assert_same_numbers(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same_numbers(a, b)
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-12, abs=1e-15)
    else:
        assert one == other


def files(out: Path) -> set[str]:
    found = {p.relative_to(out) for p in out.rglob("*") if p.is_file()}
    return {str(path) for path in found if path.parts[0] != "logs"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "result", "more"),
    [
        ("run", "results.json", ()),
        ("influence", "summary.json", ("--what-if", "drop=negative", "--confirm")),
        ("evaluate", "evaluation.json", ("--prompts", "5", "--samples", "2", "--k", "1,2")),
    ],
)
def test_two_ranks_write_what_one_process_writes(tmp_path, verb, result, more):
    one, two = tmp_path / "one", tmp_path / "two"
    alone = done(command(verb, "--out", str(one), *options(), *more))
    shared = done(command(verb, "--out", str(two), *options(), *more, ranks=2))
    assert alone.returncode == shared.returncode == 0, alone.stderr + shared.stderr
    assert_same_numbers(*(json.loads((out / result).read_text()) for out in (one, two)))
    assert files(one) == files(two)
    # One voice: the same words as alone, once.
    said = [line for line in alone.stdout.splitlines() if "Files:" not in line]
    assert [line for line in shared.stdout.splitlines() if "Files:" not in line] == said
    for word in ("lora, ", "evaluated in"):
        assert shared.stderr.count(word) == alone.stderr.count(word)
    for name in files(one):
        if name.endswith((".npy", ".parquet", ".unit", "update_rollouts.json")):
            assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.slow
def test_two_ranks_explain_a_run_as_one_process_does(tmp_path):
    """Two steps of the shipped run, one from a replayed state: every file byte for byte."""
    words = ("--from", "12", "--to", "14", "--every", "2")
    changes = ("data.evaluation_prompts=6", "memory.microbatch_size=64")
    settings = [word for change in changes for word in ("--set", change)]
    one, two = tmp_path / "one", tmp_path / "two"
    for out, ranks in ((one, 1), (two, 2)):
        result = done(command("explain", *words, "--out", str(out), *settings, ranks=ranks))
        assert result.returncode == 0, result.stderr
    assert files(one) == files(two)
    for name in files(one):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def wait(child: subprocess.Popen, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not ready() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


SWEEP = ("experiment.repeats=2", "batch_config.B_E=24", "estimator.eta_list=[1e-3, 4e-3]")
SLOW_UNITS = """
import os
import time
from pathlib import Path

from entropy_experiments.cli import main
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.sampling.units import unit_key

MARKS, DECODE = Path(os.environ["MARKS"]), SampleGenerator._decode


def marked(self, unit, meter):
    name = f"{unit_key(unit)}.{os.environ['RANK']}"
    (MARKS / f"{name}.begun").touch()
    if (MARKS / "slow").exists():
        (MARKS / f"{name}.asleep").touch()
        time.sleep(3)
    return DECODE(self, unit, meter)


SampleGenerator._decode = marked
main()
"""
"""The command, with a mark for every unit that is begun; and units that last, once asked to."""


def kept(out: Path) -> dict[str, tuple[int, bytes]]:
    found = [*out.rglob("*.unit"), *out.rglob("*.stage")]
    return {str(p.relative_to(out)): (p.stat().st_mtime_ns, p.read_bytes()) for p in found}


class Disturbed:
    """A sweep on two ranks, brought to where both draw a unit of the second repeat."""

    def __init__(self, tmp_path: Path) -> None:
        self.out, self.marks = tmp_path / "killed", tmp_path / "marks"
        self.words = ["--out", str(self.out), *options(*SWEEP)]
        self.script = tmp_path / "slow_units.py"
        self.script.write_text(SLOW_UNITS)
        self.marks.mkdir()

    def lost(self, mark: str = "begun") -> list[str]:
        """The rank of every unit that has this mark and is not on disk."""
        stored = {path.stem for path in self.out.rglob("*.unit")}
        found = [path.name.split(".") for path in self.marks.glob(f"*.{mark}")]
        return sorted(rank for key, rank, _ in found if key not in stored)

    def has_a_stage(self) -> bool:
        try:
            return any(self.out.rglob("*.stage"))
        except FileNotFoundError:  # the folder was tried, and is made again when it is written to
            return False

    def by(self, disturb: Callable[[subprocess.Popen], None]) -> tuple[int, str]:
        """Do it there; torchrun's exit code, and what all have said."""
        words = command("measure", *self.words, ranks=2)
        at = words.index("entropy_experiments.cli")
        words[at - 1 : at + 1] = [str(self.script)]
        with started(words, MARKS=str(self.marks)) as child:
            wait(child, self.has_a_stage)
            assert child.poll() is None, child.stderr.read() if child.stderr else ""
            (self.marks / "slow").touch()
            wait(child, lambda: self.lost("asleep") == ["0", "1"])
            disturb(child)
            began = time.monotonic()
            _, said = child.communicate(timeout=PATIENCE)
            assert time.monotonic() - began < 60
        return child.returncode, said


@pytest.mark.slow
def test_a_killed_rank_costs_one_unit(tmp_path):
    """SIGKILL of rank 1 in the middle of the second repeat of a sweep, while both draw."""
    sweep, undisturbed = Disturbed(tmp_path), tmp_path / "undisturbed"

    def kill(child: subprocess.Popen) -> None:
        (victim,) = (pid for pid, rank in workers(child).items() if rank == 1)
        os.kill(victim, signal.SIGKILL)

    code, said = sweep.by(kill)
    assert code != 0
    assert sweep.lost() == ["1"], said  # rank 0 has finished its own
    assert said.count("rank 0: Ended by SIGTERM. Current work is saved;") == 1, said
    survived = kept(sweep.out)
    assert sum(name.endswith(".stage") for name in survived) == 1
    again = done(command("measure", *sweep.words, ranks=2))
    assert again.returncode == 0, again.stderr
    finished = kept(sweep.out)
    for name, what in survived.items():
        assert finished[name] == what, f"{name} was made again"
    assert len(finished) > len(survived) + 2  # it was in the middle
    assert sweep.lost() == []
    alone = done(command("measure", "--out", str(undisturbed), *options(*SWEEP)))
    assert alone.returncode == 0, alone.stderr
    assert {Path(name).name for name in kept(undisturbed)} == {Path(name).name for name in finished}
    paths = (undisturbed, sweep.out)
    results = [json.loads((folder / "results.json").read_text()) for folder in paths]
    for found in results:
        for name in ("results_path", "config"):
            found.pop(name)
    assert_same_numbers(*results)


@pytest.mark.slow
def test_a_job_that_is_ended_loses_nothing(tmp_path):
    """SIGTERM to torchrun, which passes it on, as a scheduler does when time is up."""
    sweep = Disturbed(tmp_path)
    code, said = sweep.by(lambda child: child.send_signal(signal.SIGTERM))
    assert code != 0
    assert sweep.lost() == [], said
    for rank in (0, 1):
        assert f"rank {rank}: Ended by SIGTERM. Current work is saved;" in said, said


FAILING = """
import os

if os.environ.get("RANK") == {rank!r}:
    raise RuntimeError("no such judge")

def fussy(completions, problems):
    return [float(len(text) % 2) for text in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_error_on_one_rank_ends_all(tmp_path, rank):
    (tmp_path / "fussy_reward.py").write_text(FAILING.format(rank=rank))
    words = ["--out", str(tmp_path / "out"), *options('reward.functions=["fussy_reward:fussy"]')]
    began = time.monotonic()
    found = done(command("run", *words, ranks=2), PYTHONPATH=str(tmp_path))
    assert time.monotonic() - began < PATIENCE / 4
    assert found.returncode != 0
    assert found.stderr.count("no such judge") == 1, found.stderr
    assert ("On rank 1 of 2:" in found.stderr) == (rank == "1")
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.slow
def test_a_mistake_in_the_configuration_is_told_once(tmp_path):
    found = done(command("run", "--set", "batch_config.B_E=nonsense", ranks=2))
    assert found.returncode != 0
    assert found.stderr.count("got 'nonsense'") == 1, found.stderr
