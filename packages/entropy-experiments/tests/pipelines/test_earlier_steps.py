"""Which earlier batches a step's momentum is split among: folders alone, no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from entropy_experiments.checkpoints.recorded_run import RecordedRun
from entropy_experiments.pipelines.influence.earlier_steps import earlier_steps

pytestmark = pytest.mark.faults


def recorded(folder: Path, checkpoints: list[int], batches: range) -> RecordedRun:
    for step in batches:
        (folder / "record" / f"step_{step}" / "update_batch").mkdir(parents=True)
    places = {step: folder / f"checkpoint-{step}" for step in checkpoints}
    return RecordedRun(folder=folder, checkpoints=places, record=folder / "record")


def test_a_checkpoint_of_every_step_needs_no_replay(tmp_path):
    run = recorded(tmp_path, list(range(41)), range(40))
    earlier = earlier_steps(run, 40, 29, most_replayed=29, most_between=1)
    assert earlier.steps == range(11, 40)
    assert earlier.window.anchors == tuple(range(11, 41))
    assert earlier.passes == 8 * 29


def test_a_replay_begins_at_the_checkpoint_before(tmp_path):
    run = recorded(tmp_path, [0, 10, 20, 40], range(40))
    earlier = earlier_steps(run, 40, 15)
    assert earlier.steps == range(25, 40)
    assert (earlier.window.start, earlier.window.anchors) == (20, (20, 40))
    assert earlier.passes == 8 * 15 + 3 * 20


def test_a_record_that_begins_late_ends_the_reach(tmp_path):
    run = recorded(tmp_path, [0, 10, 20, 30], range(17, 30))
    assert earlier_steps(run, 30, 29).steps == range(20, 30)  # nothing leads from 10 to 17


def test_a_long_replay_is_left_to_the_user(tmp_path):
    run = recorded(tmp_path, [0, 500], range(500))
    with pytest.raises(
        ValueError,
        match=r"leads to the batches before step 500 at a bearable cost: the nearest is"
        r" checkpoint 0 \(--momentum 500 replays the 500 steps from there\)",
    ):
        earlier_steps(run, 500, 29, most_replayed=29)
    assert earlier_steps(run, 500, 29).steps == range(471, 500)


def test_states_that_would_fill_the_disk_shorten_the_reach(tmp_path):
    run = recorded(tmp_path, [0, 20, 25, 30], range(30))
    assert earlier_steps(run, 30, 29, most_between=5).steps == range(20, 30)
    with pytest.raises(ValueError, match=r"--momentum 5 replays the 5 steps from there"):
        earlier_steps(run, 30, 29, most_between=4)


def test_nothing_recorded_is_said(tmp_path):
    run = recorded(tmp_path, [0, 10], range(0))
    with pytest.raises(ValueError, match="the batch of step 9 is not recorded in"):
        earlier_steps(run, 10, 29)
    lone = recorded(tmp_path / "lone", [10], range(10))
    with pytest.raises(ValueError, match=r"there is none \(keep checkpoints before this one\)"):
        earlier_steps(lone, 10, 29)
