"""The doctor beside training code of public packages: no false alarm, not one bit changed."""

import json

import pytest

from wild.environments import environment
from wild.processes import SCRIPTS, entropy_probe, run

CUSTOM = ("blind-spot", "ChunkedLogProbFunction is a custom autograd Function")
NUMPY = ("blind-spot", "An array of numpy comes back after values have left for numpy.")
ERASED = ("erased-gradient", "The gradients of 12 parameters are erased")

LOOPS: dict[str, tuple[str, set[tuple[str, str]]]] = {
    "ignite_engine": ("loops", set()),
    "lightning_boring": ("loops", set()),
    "metric_learning_triplets": ("loops", set()),
    "pyro_svi": ("loops", set()),
    "skorch_classifier": ("loops", {NUMPY}),
    "stable_baselines3_ppo": ("loops", {NUMPY}),
    # The actor's loss goes through the critic, whose optimizer throws those gradients away.
    "stable_baselines3_sac": ("loops", {NUMPY, ERASED}),
    "trl_sft": ("trl-1.16", {CUSTOM}),
    "trl_dpo": ("trl-1.16", {CUSTOM}),
}
"""script -> environment, and the notes (class, what) that were verified to be true of it."""


@pytest.mark.parametrize("name", LOOPS)
def test_the_doctor_is_silent_and_changes_nothing(name, tmp_path):
    python, true_notes = environment(LOOPS[name][0]), LOOPS[name][1]
    script = SCRIPTS / "loops" / f"{name}.py"
    plain = run(python, script, tmp_path / "plain.json")
    assert plain.returncode == 0, plain.stderr[-4000:]
    examined = entropy_probe(
        *("doctor", "--json", tmp_path / "doctor.json", script, tmp_path / "examined.json"),
        python=python,
    )
    assert examined.returncode == 0, (examined.stdout + examined.stderr)[-4000:]
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["steps"] >= 5
    assert {finding["severity"] for finding in report["findings"]} <= {"note"}
    unknown = [f for f in report["findings"] if not any(_is(f, note) for note in true_notes)]
    assert unknown == []
    for note in true_notes:  # else the table is out of date
        assert any(_is(finding, note) for finding in report["findings"]), note
    assert (tmp_path / "examined.json").read_text() == (tmp_path / "plain.json").read_text()


def _is(finding, note):
    return finding["class"] == note[0] and finding["what"].startswith(note[1])
