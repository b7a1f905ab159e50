"""kill -9 at fifty random instants of `run`, `influence`, `explain`, `train`: the same bits.

Offline commands: ten kills in a row, each of a process that goes on where the one before was
killed, then one that is left alone; five times. `explain` has two steps of the shipped run, one of
them from a replayed state. `train`: half of the instants are times, half are
changes of files, between which a kill is most awkward; after two or three of them the training is
left alone. Every process has one thread, so that sums are added in the same order.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entropy_experiments.artifacts import hashed_body
from entropy_experiments.online.rows import read_rows
from oracles import killed_training

pytestmark = pytest.mark.invariant

SMALL = ("batch_config.B_E=8", "generation.gen_batch_size=4")
DRAWN = ("update.batch=drawn", "batch_config.B_U=2", "batch_config.G=4")
COMMANDS = {
    "run": ("run", *SMALL, *DRAWN),
    "influence": ("influence", *SMALL, *DRAWN, "influence.measured_rollouts=3"),
    "explain": ("explain", "data.evaluation_prompts=6", "memory.microbatch_size=64"),
}
WORDS = {"explain": ("--from", "12", "--to", "14", "--every", "2")}
FOLDERS, KILLS = 5, 10
PATIENCE = 600
"""Seconds until a hang is a failure."""


def started(verb: str, out: Path) -> subprocess.Popen:
    name, *settings = COMMANDS[verb]
    options = [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "entropy_experiments.cli", name),
            *WORDS.get(verb, ()),
            *("--out", str(out), *options),
        ],
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


def contents(verb: str, out: Path) -> dict[str, object]:
    """All files; without how long things took, when, and the folder's own name.

    A ledger of a run has none of these in its files, stages included.
    """
    found: dict[str, object] = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        name, data = path.relative_to(out).as_posix(), path.read_bytes()
        if path.suffix in (".stage", ".unit"):
            hashed_body(path, data)
            found[name] = data if verb == "explain" and path.suffix == ".stage" else "whole"
        elif name.startswith("logs/"):
            continue  # one for every command, named by its time
        elif verb == "explain":
            found[name] = data
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
    return request.param, contents(request.param, out), time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("folder", range(FOLDERS))
def test_killed_ten_times(undisturbed, tmp_path, folder):
    verb, wanted, seconds = undisturbed
    out, draw, killed = tmp_path / "out", random.Random(folder), 0
    for _ in range(3 * KILLS):
        if kill_after(draw.uniform(0, seconds), verb, out):
            killed += 1
            if killed == KILLS:
                break
        else:  # a quieter machine than it was: it had finished, so it begins anew
            _same(contents(verb, out), wanted)
            shutil.rmtree(out)
            seconds *= 0.7
    assert killed == KILLS
    finish(verb, out)
    _same(contents(verb, out), wanted)
    assert not list(out.rglob("*.partial"))


def _same(found: dict[str, object], wanted: dict[str, object]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == value, name


# train

TRAINING = {
    "lora": {"r": 2, "alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "reward_functions": ["oracles.tiny_grpo:reward"],  # no group has equal rewards
    "eval_prompts": 5,
    "buffer_size": 2,
    "microbatch_size": 1,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": 3,
    "learning_rate": 3e-3,
    "save_steps": 1,
    "probe": {"prompts": 5, "max_overhead": None},
    "doctor": {"mode": "auto", "trace_steps": 1},
}
TIMED = ("step_time", "overhead", "entropy_probe/overhead", "seconds")
OF_THE_PROCESS = ("steps_now", "resumed_from")


def without(names: tuple[str, ...], value: object) -> object:
    if isinstance(value, dict):
        return {k: without(names, v) for k, v in value.items() if k not in names}
    return [without(names, part) for part in value] if isinstance(value, list) else value


def trained(out: Path) -> dict[str, object]:
    """All files of a training, without how long things took and what each process had to do."""
    files: dict[str, object] = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        name, data = path.relative_to(out).as_posix(), path.read_bytes()
        if path.name == "trainer_state.json":
            files[name] = without(TIMED, json.loads(data))
        elif path.name == "train_summary.json":
            files[name] = without((*TIMED, *OF_THE_PROCESS), json.loads(data))
        elif path.name == "entropy_probe.jsonl":  # a resumed step's row stands there twice
            files[name] = without(TIMED, read_rows(path))
        elif path.name == "entropy_probe_record.json":
            files[name] = without(("trainer_state.json",), json.loads(data))  # its sha256
        else:
            files[name] = data
    return files


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """(context, what an undisturbed one leaves, its seconds, how often it changes files)."""
    made, folder = killed_training.context(), tmp_path_factory.mktemp("train") / "whole"
    for place in (folder.with_name("first"), folder):  # the first one starts the server
        begun = time.monotonic()
        assert killed_training.ended(
            killed_training.start(made, place, TRAINING), patience=PATIENCE
        ), (place / "output.txt").read_text()
    changes = int((folder / killed_training.COUNT).read_text())
    assert trained(folder / "out") == trained(folder.with_name("first") / "out")
    return made, trained(folder / "out"), time.monotonic() - begun, changes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FOLDERS))
def test_a_training_killed_ten_times(training, tmp_path, seed):
    made, wanted, seconds, changes = training
    draw, killed, place = random.Random(seed), 0, 0
    while killed < KILLS:
        folder, place = tmp_path / str(place), place + 1
        for _ in range(draw.choice((2, 3))):
            if draw.random() < 0.5:
                process = killed_training.start(made, folder, TRAINING)
                after = draw.uniform(0, seconds)
                killed += killed_training.kill_after(after, process, patience=PATIENCE)
            else:
                at = draw.randrange(changes)
                process = killed_training.start(made, folder, TRAINING, kill_at=at)
                killed += not killed_training.ended(process, patience=PATIENCE)
        process = killed_training.start(made, folder, TRAINING)
        told = folder / "output.txt"
        assert killed_training.ended(process, patience=PATIENCE), told.read_text()
        files = trained(folder / "out")
        assert files.keys() == wanted.keys(), told.read_text()
        for name, value in wanted.items():
            assert files[name] == value, (name, told.read_text())
