"""A finished study whose files were damaged: a rerun makes them again or refuses them by name."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from entropy_experiments import EntropyInfluenceRunner, OfflineEntropyProbe
from entropy_experiments.artifacts import hashed_body
from entropy_experiments.config import parse_config
from entropy_experiments.pipelines.influence.store import RunDirectory, Stage
from entropy_experiments.sampling.rollout_files import RolloutStore, save_rollouts
from oracles.cases import case
from oracles.small_study import plan, settings_in

pytestmark = pytest.mark.faults

TIMED = (".stage", ".unit")
"""Their bytes hold how long they took, or the order of writing; their own hash guards the rest."""


def study_in(folder: Path) -> None:
    EntropyInfluenceRunner(settings_in(folder), quiet=True).run(plan(folder, plots=False))


def probe_in(folder: Path) -> None:
    small = {
        "batch_config.B_E": 4,
        "batch_config.B_U": 2,
        "batch_config.G": 2,
        "update.batch": "drawn",
        "approx_delta_h.curvature": False,
        "detailed_logging.enabled": False,
    }
    config = parse_config({}).replaced(small).under(folder)
    OfflineEntropyProbe(config, quiet=True).run_mixed_probe()


COMMANDS = {"influence": study_in, "run": probe_in}


@pytest.fixture(scope="module", params=COMMANDS)
def whole(request, tmp_path_factory):
    """(folder, its files, the command): files name the folder, so damage is done in place."""
    folder = tmp_path_factory.mktemp(request.param) / "out"
    COMMANDS[request.param](folder)
    return folder, files_of(folder), COMMANDS[request.param]


@pytest.fixture
def finished(whole):
    folder, files, _ = whole
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return whole


def files_of(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def damaged(data: bytes, draw: random.Random) -> bytes | None:
    """The bytes that are left; None: the file is gone."""
    kind = draw.choice(["flip", "flip", "flip", "cut", "longer", "empty", "gone"])
    if kind == "gone":
        return None
    if kind == "flip" and data:
        at = draw.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == "cut":
        return data[: draw.randrange(len(data))] if data else b"x"
    return data + b"\n" if kind == "longer" else b""


def _untimed(path: str, data: bytes) -> object:
    """Of summary.json all but how long it took, and of the manifest all but the hash of that."""
    if path == "summary.json":
        return {**json.loads(data), "timings": None}
    if path == "manifest.json":
        said = json.loads(data)
        return {**said, "digest": None, "files": {**said["files"], "summary.json": None}}
    return data


def check(finished, seed: int) -> None:
    folder, files, again = finished
    draw = random.Random(seed)
    name = draw.choice(sorted(set(files) - {"results.json"}))
    left = damaged(files[name], draw)
    (folder / name).unlink() if left is None else (folder / name).write_bytes(left)
    refusal = None
    try:
        again(folder)
    except (ValueError, OSError) as error:
        refusal = str(error)
    if refusal is not None:  # by name, or (the table of contents) by the folder's
        assert Path(name).name in refusal or str(folder) in refusal
        return
    after = files_of(folder)
    assert after.keys() == files.keys(), (name, left)
    for path, data in after.items():
        if path.endswith(TIMED):
            hashed_body(folder / path, data)
        elif path != "results.json":
            assert _untimed(path, data) == _untimed(path, files[path]), (name, path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_corruptions(finished, seed):
    check(finished, seed)


@pytest.fixture
def small(tmp_path):
    """A finished study with files of every kind."""
    run = RunDirectory(tmp_path)
    run.bind("a" * 64)
    run.stages.put("base", "b" * 64, Stage(facts={"x": 1}, tensors={"y": torch.ones(3)}), 0.1)
    store = RolloutStore(tmp_path / "rollouts" / "units" / "c")
    store.bind({"policy": "d"})
    store.put("e", {"tokens_T": torch.arange(5)})
    save_rollouts(tmp_path / "rollouts" / "eval", case("tabular", 0, 1.0).rollouts, meta={"f": "g"})
    run.write({"summary.json": b'{"h": 1}', "deep/array.npy": b"12345"}, "i" * 64, {"j": {"k": 1}})
    assert run.finished("i" * 64)
    return run


@pytest.mark.parametrize("seed", range(60))
def test_every_file_of_a_study_is_looked_at(small, seed):
    files = files_of(small.folder)
    draw = random.Random(seed)
    name = draw.choice(sorted(files))
    left = damaged(files[name], draw)
    (small.folder / name).unlink() if left is None else (small.folder / name).write_bytes(left)
    again = RunDirectory(small.folder)
    try:
        again.bind("a" * 64)
        found = again.finished("i" * 64)
    except (ValueError, OSError):
        return
    # Its identity is written anew; all else has to be made again.
    assert not found or files_of(small.folder) == files, name


def test_without_the_list_damage_would_stay(small, monkeypatch):
    """Teeth."""
    monkeypatch.setattr(RunDirectory, "_stored", lambda self: {})
    small.write({"summary.json": b'{"h": 1}'}, "i" * 64, {})
    (small.folder / "rollouts" / "eval" / "text.json").write_bytes(b"[]")
    assert small.finished("i" * 64)
