"""Pictures of tasks: every cell in its colour, nothing fetched from elsewhere."""

import re

import numpy as np
import pytest
from typer.testing import CliRunner

from arc_refine.evaluate import evaluate
from arc_refine.show import COLOURS, page, render, svg
from arc_refine.train import train
from entropy_experiments.cli import app

from .small import Small, small_config


@pytest.fixture(scope="module")
def outcomes(tasks):
    small = Small(tasks)
    return evaluate(small.training, small.data.held_out_episodes(), small.data.batch)


def test_svg_has_each_cell_in_its_colour_and_place():
    grid = np.array([[0, 1, 2], [9, 8, 7]])
    found = re.findall(r'x="(\d+)" y="(\d+)" width="14" height="14" fill="(#\w+)"', svg(grid))
    assert found == [
        (str(14 * x), str(14 * y), COLOURS[grid[y, x]]) for y in range(2) for x in range(3)
    ]
    assert len(set(COLOURS)) == 10


@pytest.mark.parametrize("side", [1, 30])
def test_smallest_and_largest_grid(side):
    assert svg(np.zeros((side, side), dtype=int)).count("<rect") == side * side


def test_page_is_self_contained_and_shows_everything(outcomes):
    text = page(outcomes, "a <run>")
    assert "a &lt;run&gt;" in text
    assert not re.search(r"<script|https?://|<link|src=", text)
    for outcome in outcomes:
        assert f'id="{outcome.task_id}"' in text
    first = text.split("<section")[1]
    demos = len(outcomes[0].episode.inputs.demos)
    assert first.count("<svg") == 2 * demos + 4  # pairs; query, target, before, after
    for word in ("query", "target", "before", "after", "% of cells"):
        assert word in first


def test_png(outcomes, tmp_path):
    matplotlib = pytest.importorskip("matplotlib.image")
    file = render(outcomes, tmp_path / "deep" / "tasks.png", title="run")
    pixels = matplotlib.imread(file)[..., :3]
    wanted = outcomes[0].episode.target
    for colour in np.unique(wanted):
        rgb = np.array([int(COLOURS[colour][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels - rgb).max(-1) < 0.01).sum() > 20


def test_other_names_are_refused(outcomes, tmp_path):
    with pytest.raises(ValueError, match=r"'tasks.gif', expected a name that ends"):
        render(outcomes, tmp_path / "tasks.gif", title="run")
    with pytest.raises(ValueError, match="no task to show"):
        render([], tmp_path / "tasks.html", title="run")


def test_by_command(tasks, tmp_path):
    config = small_config(tasks, max_batches=1, doctor=0)
    run = train(config, tmp_path / "run", say=lambda _: None)

    def show(*words):
        return CliRunner().invoke(app, ["arc", "show", str(run), *map(str, words)])

    done = show("--out", tmp_path / "a.html", "--count", 1)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a.html").read_text().count("<section") == 1
    done = show("--out", tmp_path / "b.html", "--task", "task00", "--data", tasks)
    assert 'id="task00"' in (tmp_path / "b.html").read_text()
    done = show("--task", "nothing", "--data", tasks)
    assert done.exit_code == 2
    assert "has no task nothing" in done.stderr
