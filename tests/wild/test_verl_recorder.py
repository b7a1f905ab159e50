"""A loop of verl's shape, recorded in verl's environment and replayed by our commands in ours.

verl's DataProto, its unpadding, its engine base class and its losses are the installed ones; the
script asserts that training ends in the same bits with and without the record.
"""

import json

import pytest

from entropy_experiments.sampling.rollout_files import load_update_batch
from wild.processes import entropy_probe, run_script

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
STEPS, SAVED = 5, 3
SAME = 1e-6
FOUR = ["1+2=", "12*3=", "4-1=", "(1+2)*34=", "7*7=", "5+5=", "6+5=", "3+5=", "3-2=", "(4)="]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl_loop")
    report = run_script("verl", "verl_recorded_loop.py", folder)
    rows = [{"prompt": prompt, "answer": "1"} for prompt in FOUR]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, report


def _options(folder):
    return (
        *("--set", "checkpoint.dtype=float64", "--set", "data.dataset=jsonl"),
        *("--set", f"data.file={folder / 'prompts.jsonl'}", "--set", "data.evaluation_prompts=6"),
    )


@pytest.mark.parametrize("mode", MODES)
def test_nothing_failed(trained, mode):
    report = trained[1][mode]
    assert report == {"off": None, "steps": STEPS, "driver_off": [], "rows": 8}


@pytest.mark.parametrize("mode", MODES)
def test_run_rebuilds_the_step_that_was_made(trained, mode, tmp_path):
    folder, _ = trained
    checkpoint = folder / mode / f"step_{SAVED}"
    done = entropy_probe(
        "run", "--checkpoint", checkpoint, "--out", tmp_path / "out", *_options(folder)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "The update that training made after step_3" in done.stdout
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["update"] == "recorded"
    assert result["step_certificate"]["passed"]
    assert result["step_certificate"]["relative_error"] < SAME
    assert result["made_step"]["gradient_distance"] < SAME  # the loss is followed, too
    assert result["made_step"]["reasons"] == []
    assert "deltaH1" in result
    assert "deltaH_true" in result


def test_influence_splits_it(trained, tmp_path):
    folder, _ = trained
    checkpoint = folder / MODES[0] / f"step_{SAVED}"
    done = entropy_probe(
        *("influence", "--checkpoint", checkpoint, "--out", tmp_path / "out"),
        *(*_options(folder), "--set", "influence.plots=false"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    certified = summary["update"]["certified"]
    assert certified["step_distance"] < SAME
    assert certified["gradient_distance"] < SAME
    assert (tmp_path / "out" / "tokens.parquet").is_file()


@pytest.mark.parametrize("mode", MODES)
def test_the_driver_s_batches_are_the_workers_(trained, mode):
    folder = trained[0] / mode
    for step in range(STEPS):
        ours, _ = load_update_batch(folder / "record" / f"step_{step}" / "update_batch")
        theirs, _ = load_update_batch(folder / "driver_record" / f"step_{step}" / "update_batch")
        assert ours.rollouts.fingerprint == theirs.rollouts.fingerprint
        assert bool((ours.advantage_NS == theirs.advantage_NS).all())


def test_the_driver_s_batches_are_beside_their_checkpoints_after_a_resume(trained):
    """Stopped in its third step, resumed by verl from global_step_2, saved again at 4."""
    folder = trained[0] / MODES[0]
    for step in (2, 4):
        beside, meta = load_update_batch(folder / "driver" / f"global_step_{step}/update_batch")
        theirs, _ = load_update_batch(folder / "record" / f"step_{step}" / "update_batch")
        assert meta["step"] == step
        assert beside.rollouts.fingerprint == theirs.rollouts.fingerprint
