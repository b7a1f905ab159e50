"""Other people's GRPO trainers made of TRL's, as their packages have them on a CPU."""

import json

import pytest

from wild.processes import entropy_probe, run_script

STEPS = 50
"""As grpo_callback has them."""


@pytest.fixture(scope="module")
def under_unsloth(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unsloth")
    return folder, run_script("unsloth", "unsloth_callback.py", folder)


def test_the_callback_records_and_changes_nothing_under_unsloth(under_unsloth):
    """unsloth patches TRL on a GPU only; here its import must leave all as it is."""
    _, report = under_unsloth
    assert report["trl"] == "1.9.2"
    for kind in ("grpo", "rloo"):
        assert report[kind]["off"] is None
        assert report[kind]["missing"] == []
        assert report[kind]["mismatch"] < 1e-3


def test_its_step_is_replayed(under_unsloth, tmp_path):
    folder, _ = under_unsloth
    done = entropy_probe(
        *("run", "--checkpoint", folder / "run" / f"checkpoint-{STEPS - 2}"),
        *("--out", tmp_path / "out", "--set", f"checkpoint.base={folder / 'base'}"),
        *("--set", "data.evaluation_prompts=4"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["step_certificate"]["passed"]
    assert result["made_step"]["gradient_distance"] < 1e-3


def test_ms_swift_s_trainer_is_refused_by_name(tmp_path):
    report = run_script("ms-swift", "swift_refusal.py", tmp_path)
    assert report["of_trl"]
    assert report["own_samples"]
    assert not report["a_mapping"]  # TRL's batches are mappings of tensors: the reason holds
    assert "in ms-swift's GRPOTrainer: it keeps batches of its own form" in report["said"]
    assert "entropy_experiments.StepRecorder" in report["said"]
