"""Our callback under every TRL that people have: it predicts, it records, and it changes nothing.

The script trains GRPO and RLOO with and without the callback and compares weights, optimizer state,
history and random numbers bit for bit. What it recorded is replayed here, by the offline command in
the tests' own environment: the step rebuilt from the record is the step that that version made.
"""

import json

import pytest

from wild.processes import entropy_probe, run_script

VERSIONS = {"1.16.0": "5.22.2", "1.9.2": "5.12.1", "0.29.1": "5.3.0", "0.24.0": "4.57.6"}
"""TRL, and the transformers that it runs on."""
STEPS, RLOO_STEPS = 50, 3
"""As the script has them."""


@pytest.fixture(scope="module", params=VERSIONS)
def trained(request, tmp_path_factory):
    version = request.param
    folder = tmp_path_factory.mktemp(f"trl-{version}")
    report = run_script(f"trl-{version.rpartition('.')[0]}", "grpo_callback.py", folder)
    assert report["trl"] == version
    assert report["transformers"] == VERSIONS[version]
    return folder, report


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_training_with_and_without_the_callback(trained, kind):
    report = trained[1][kind]
    assert report["off"] is None
    assert report["missing"] == []  # every name of the version's row
    assert report["tokens_differ"] == []
    assert report["ends"]
    steps, every = (STEPS, 10) if kind == "grpo" else (RLOO_STEPS, 1)
    assert report["steps"] == [steps, steps]
    assert report["rows"] == list(range(0, steps, every))
    assert report["mismatch"] < 1e-3  # the step that was predicted is the step that was made


def test_nothing_was_warned_about(trained):
    assert trained[1]["messages"] == []


@pytest.mark.parametrize(
    ("run", "step"), [("run", STEPS - 2), ("rloo_run", RLOO_STEPS - 1)], ids=["grpo", "rloo"]
)
def test_the_recorded_step_is_replayed(trained, run, step, tmp_path):
    folder, _ = trained
    done = entropy_probe(
        *("run", "--checkpoint", folder / run / f"checkpoint-{step}", "--out", tmp_path / "out"),
        *("--set", f"checkpoint.base={folder / 'base'}", "--set", "data.evaluation_prompts=4"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["update"] == "recorded"
    assert result["step_certificate"]["passed"]
    assert result["step_certificate"]["relative_error"] < 1e-3
    assert result["made_step"]["gradient_distance"] < 1e-3
