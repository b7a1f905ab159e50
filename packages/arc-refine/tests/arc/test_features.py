"""The fifteen numbers against hand counts, and that every task of ARC keeps them in range."""

import numpy as np
import pytest

from arc.grids import double_task, flip_task, grid
from arc_refine.data import Pair, load_tasks
from arc_refine.features import FEATURE_NAMES, describe, features

X = np.array([[1, 1], [2, 0]])
PAIRS = (
    Pair(X, np.array([[1, 1], [3, 0]])),  # one of four cells changes, 2 is lost, 3 is new
    Pair(X, np.array([[4, 0, 4, 5, 4, 0]] * 4)),
)


def test_against_hand_counts():
    got = dict(zip(FEATURE_NAMES, features(PAIRS).tolist()))
    log30 = np.log(30)
    expected = {
        "log_area_ratio": (0 + np.log(6) / 2) / 2 / log30,
        "log_height_ratio": (0 + np.log(2)) / 2 / log30,
        "log_width_ratio": (0 + np.log(3)) / 2 / log30,
        "input_height": 2 / 30,
        "input_width": 2 / 30,
        "output_height": 3 / 30,
        "output_width": 4 / 30,
        "input_colours": 0.3,
        "output_colours": 0.3,
        "new_colours": (1 + 2) / 2 / 10,
        "lost_colours": (1 + 2) / 2 / 10,
        "changed_cells": 0.25 / 2,
        "same_size": 0.5,
        "symmetric_output": 0.5,  # the second: its rows are equal
        "demonstrations": 0.2,
    }
    assert got == pytest.approx(expected, abs=1e-6)
    assert len(FEATURE_NAMES) == 15


@pytest.mark.parametrize("source", ["training", "evaluation"])
def test_finite_and_in_range_on_every_task(source):
    table = np.stack([features(task.demos) for task in load_tasks(source)])
    assert table.dtype == np.float32
    assert table.shape == (400, 15)
    assert np.isfinite(table).all()
    assert np.abs(table).max() <= 1
    assert (table.std(0) > 0.01).all()  # no number is the same for all tasks


def test_the_extremes_stay_in_range():
    for a, b in (((1, 1), (30, 30)), ((30, 30), (1, 1))):
        values = features([Pair(grid(*a, 0), grid(*b, 0))] * 12)
        assert np.isfinite(values).all()
        assert np.abs(values).max() <= 1


def test_the_text_tells_tasks_apart():
    text = describe(features(PAIRS), PAIRS)
    assert "2 demonstrations" in text
    assert "Sizes 2x2 to 2x2 4x6." in text
    assert "new 345, lost 2." in text
    assert "Changed 12%" in text
    other = double_task().demos
    assert describe(features(other), other) != text
    assert "Changed unknown" in describe(features(other), other)


def test_a_template_with_an_unknown_field_is_refused():
    demos = flip_task().demos
    assert describe(features(demos), demos, template="{demos} shown") == "3 shown"
    with pytest.raises(ValueError, match=r"uses 'answer'; expected fields of demos, input"):
        describe(features(demos), demos, template="{answer}")
    with pytest.raises(ValueError, match="Correct the template"):
        describe(features(demos), demos, template="{}")
