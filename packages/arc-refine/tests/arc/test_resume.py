"""Kill and resume: the same next step, bit for bit; half a checkpoint is never read."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from arc_refine import train as module
from arc_refine.checkpoint import find_checkpoint, load_checkpoint
from arc_refine.metrics import read_rows
from arc_refine.train import load_run, resume, train

from .small import same, small_config


def weights(run, step):
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "weights.safetensors")


def numbers(run):
    """Rows without what a clock says."""
    rows = read_rows(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def silent(_):
    pass


@pytest.fixture(scope="module")
def whole(tasks, tmp_path_factory):
    """Two epochs of three batches, never interrupted."""
    config = small_config(tasks, epochs=2, max_batches=3, checkpoint_every=2, doctor=0)
    return train(config, tmp_path_factory.mktemp("whole") / "run", say=silent)


@pytest.mark.parametrize("broken", [1, 2, 4, 5])
def test_interrupted_anywhere_the_rest_has_the_same_bits(
    whole, tasks, tmp_path, monkeypatch, broken
):
    """Mid-epoch, at a checkpoint, in the second epoch; also with the doctor on the second time."""
    config = small_config(tasks, epochs=2, max_batches=3, checkpoint_every=2, doctor=0)
    true, made = module.train_step, []

    def interrupted(training, *rest):
        if training.step == broken and not made:
            made.append(True)
            raise KeyboardInterrupt
        return true(training, *rest)

    monkeypatch.setattr(module, "train_step", interrupted)
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(config, run, say=silent)
    if broken == 1:  # before the first checkpoint there is nothing to go on from
        with pytest.raises(ValueError, match=r"no whole checkpoint to read"):
            resume(run, {}, say=silent)
        return
    torch.manual_seed(99)  # whatever the process did before
    resume(run, {}, say=silent)
    assert numbers(run) == numbers(whole)
    assert same(weights(run, 6), weights(whole, 6))
    a, b = (load_checkpoint(find_checkpoint(r))[1]["optimizers"] for r in (run, whole))
    for name in ("main", "policy"):
        for key, state in a[name]["state"].items():
            assert all(torch.equal(v, b[name]["state"][key][k]) for k, v in state.items())


def test_resume_has_teeth(whole, tasks, tmp_path):
    """Another seed has other bits: the comparison above can fail."""
    config = small_config(tasks, epochs=2, max_batches=3, checkpoint_every=2, doctor=0, seed=1)
    other = train(config, tmp_path / "run", say=silent)
    assert not same(weights(other, 6), weights(whole, 6))


def test_a_longer_run_continues_a_finished_one(whole, tasks, tmp_path):
    config = small_config(tasks, epochs=1, max_batches=3, checkpoint_every=2, doctor=0)
    run = train(config, tmp_path / "run", say=silent)
    said = []
    resume(run, {}, say=said.append)
    assert "nothing left to do" in said[-1]
    resume(run, {"epochs": 2}, say=silent)
    assert same(weights(run, 6), weights(whole, 6))


def test_only_the_length_of_a_run_may_change(whole):
    with pytest.raises(ValueError, match=r"got other values for --lr-agent, --refine"):
        resume(whole, {"lr_agent": 1.0, "refine": "off"}, say=silent)


def test_half_a_checkpoint_is_passed_over_or_refused(tasks, tmp_path):
    config = small_config(tasks, max_batches=4, checkpoint_every=2, doctor=0)
    run = train(config, tmp_path / "run", say=silent)
    last = find_checkpoint(run)
    assert last.name == "step_000004"
    file = last / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"no whole checkpoint: weights.safetensors has \d+ bytes"):
        load_checkpoint(last)
    assert find_checkpoint(run).name == "step_000002"
    (run / "checkpoints" / "step_000002" / "state.json").unlink()
    with pytest.raises(ValueError, match=r"has no whole checkpoint to read"):
        find_checkpoint(run)


def test_a_checkpoint_runs_no_code(tasks, tmp_path):
    """state.pt is read with weights_only: a pickled call is refused."""
    config = small_config(tasks, max_batches=1, doctor=0)
    run = train(config, tmp_path / "run", say=silent)
    folder = find_checkpoint(run)

    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    torch.save(Evil(), folder / "state.pt")
    facts = json.loads((folder / "state.json").read_text())
    facts["sizes"]["state.pt"] = (folder / "state.pt").stat().st_size
    (folder / "state.json").write_text(json.dumps(facts))
    with pytest.raises(Exception, match=r"[Ww]eights.only|Unsupported"):
        load_run(run)


def test_other_tasks_or_another_language_model_are_refused(whole, tmp_path, monkeypatch):
    true = module.load_data
    with monkeypatch.context() as patch:
        fewer = lambda c: replace(true(c), held_out=true(c).held_out[:1])  # noqa: E731
        patch.setattr(module, "load_data", fewer)
        with pytest.raises(ValueError, match=r"are not those that .* was trained on"):
            load_run(whole)
    begin = module.begin

    def other_lm(config):
        training = begin(config)
        training.networks = replace(training.networks, lm_fingerprint="other")
        return training

    monkeypatch.setattr(module, "begin", other_lm)
    with pytest.raises(ValueError, match=r"has other weights than when"):
        load_run(whole)


@pytest.mark.slow
def test_killed_with_signal_9_and_resumed(whole, tasks, tmp_path):
    """A process of its own, killed when it has made a checkpoint."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "arc_refine", "train", "--data", str(tasks), "--out", str(run)]
    command += [
        "--prompt-width",
        "16",
        "--agent-width",
        "8",
        "--agent-steps",
        "2",
        "--batch-size",
        "4",
    ]
    command += ["--eval-batches", "1", "--epochs", "2", "--max-batches", "3"]
    command += ["--checkpoint-every", "2", "--doctor", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        deadline = time.monotonic() + 120
        while not (run / "checkpoints" / "latest").is_file() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (run / "checkpoints" / "latest").is_file()
    resume(run, {}, say=silent)
    assert numbers(run) == numbers(whole)
    assert same(weights(run, 6), weights(whole, 6))
