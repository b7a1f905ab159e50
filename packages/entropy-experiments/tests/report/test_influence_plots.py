"""What a study draws: where, when, and always the same bytes."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from entropy_experiments import EntropyInfluenceRunner
from entropy_experiments.pipelines.influence import files
from entropy_experiments.report.figures import style
from entropy_experiments.report.figures.charts import ledger_figure
from entropy_experiments.report.figures.samples import plot_grad_delta_samples
from entropy_experiments.report.figures.write import study_plots
from entropy_experiments.report.html.books import study_books
from entropy_experiments.study_files import open_run
from oracles.small_study import EVERYTHING, plan, settings_in

pytestmark = pytest.mark.contract

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def copy(study, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(study[0], folder)
    return folder


def plots(folder):
    return {p.name: p.read_bytes() for p in (folder / "plots").iterdir()}


def test_every_evaluation_batch_is_drawn(study):
    folder, _, _ = study
    found = plots(folder)
    assert set(found) == {
        f"{name}_{what}.png"
        for name in ("eval_00", "eval_01")
        for what in ("ledger", "grad_delta_samples")
    }
    for data in found.values():
        assert data.startswith(PNG)
        assert len(data) > 5_000
        assert b"Software" not in data


def test_drawn_anywhere_the_bytes_are_the_same(study):
    """In another process, with a style and a backend of the user's own."""
    folder, _, _ = study
    code = f"""
import matplotlib
matplotlib.rcParams.update({{"font.size": 31, "lines.linewidth": 9, "savefig.dpi": 7}})
from pathlib import Path
from entropy_experiments.report.figures.write import study_plots
from entropy_experiments.study_files import open_run
import sys
run = open_run({str(folder)!r})
for name, data in study_plots(run, run.summary()).items():
    assert (run.folder / name).read_bytes() == data, name
assert matplotlib.rcParams["font.size"] == 31
assert not {{"torch", "matplotlib.pyplot"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_drawing_again_leaves_the_study_as_it_is(copy):
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file()}
    assert plot_grad_delta_samples(copy).name == "eval_00_grad_delta_samples.png"
    assert {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file()} == before
    chosen = plot_grad_delta_samples(copy, [5, 0])
    assert chosen.name == "eval_00_grad_delta_samples_5_0.png"
    other = plot_grad_delta_samples(copy, evaluation="eval_01")
    assert other.name == "eval_01_grad_delta_samples.png"
    assert open_run(copy).read("plots/eval_01_grad_delta_samples.png")  # as the manifest has it


def test_without_matplotlib_a_note_says_how(copy, monkeypatch):
    """Nothing fails, and the drawings are made up for when it is there."""
    before, run = plots(copy), EntropyInfluenceRunner(settings_in(copy), quiet=True).run
    asked = plan(copy, **EVERYTHING)
    monkeypatch.setattr(style, "find_spec", lambda name: None)
    summary = run(asked)
    assert not (copy / "plots").exists()
    (note,) = [note for note in summary["notes"] if "plots" in note]
    assert "matplotlib is not installed (pip install 'entropy-experiments[plot]')" in note
    monkeypatch.undo()
    assert not [note for note in run(asked)["notes"] if "plots" in note]
    assert plots(copy) == before


def test_not_asked_for_nothing_is_drawn(copy, monkeypatch):
    def refuse(*_):
        raise AssertionError("something was drawn")

    monkeypatch.setattr(files, "study_plots", refuse)
    summary = EntropyInfluenceRunner(settings_in(copy), quiet=True).run(plan(copy))
    assert not [note for note in summary["notes"] if "plots" in note]
    assert not (copy / "plots").exists()


def test_one_book_without_rewards(study):
    """The ledger of fresh answers to the update's prompts has no reward: one panel."""
    _, summary, _ = study
    both, alone = (
        ledger_figure(study_books(found, "token"), columns=2) for found in summary["evaluations"]
    )
    assert [len(figure.axes) for figure in (both, alone)] == [2, 1]
    (axes,) = alone.axes
    lines = summary["evaluations"][1]["ledger"]["entropy"]
    shown = [text.get_text() for text in axes.get_yticklabels()]
    assert shown[:2] == ["momentum", "weight decay"]
    assert shown[-4:] == ["predicted", "curvature", "unexplained", "measured"]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths[0] == lines["lines"]["momentum"]["this_step"]
    assert widths[-1] == lines["measured"]["value"]


def test_a_plot_of_an_unknown_kind_is_refused(study, tmp_path):
    folder, _, _ = study
    with pytest.raises(ValueError, match=r"Cannot draw a .doc file; expected one of .*png"):
        plot_grad_delta_samples(folder, path=tmp_path / "x.doc")
    assert (
        plot_grad_delta_samples(folder, path=tmp_path / "x.svg").read_bytes().startswith(b"<?xml")
    )
    assert study_plots(open_run(folder), {"evaluations": []}) == {}
