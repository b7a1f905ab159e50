"""Figures for papers: the numbers of the HTML report, the same bytes every time, one style."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from entropy_experiments.cli import app
from entropy_experiments.pipelines.trajectory import write_trajectory
from entropy_experiments.report.figures import style
from entropy_experiments.report.figures.style import WIDTH, image, panels, paper_style
from entropy_experiments.report.figures.write import figures_of, write_figures
from entropy_experiments.report.html.charts import figures as charts
from entropy_experiments.report.html.data import gather
from oracles.report_runs import HOSTILE, changed
from report.test_html_report import Steps

pytestmark = pytest.mark.contract

NAMES = {"curve", "ledger", "rollouts", "points", "cells", "what_if", "matrix", "trajectory"}


@pytest.fixture(scope="module")
def data(report_run, tmp_path_factory):
    steps = write_trajectory(Steps(), tmp_path_factory.mktemp("steps") / "trajectory.json")
    return gather(report_run, trajectory=steps)


@pytest.fixture(scope="module")
def made(data):
    with paper_style():
        return figures_of(data, columns=1)


def test_every_section_of_the_report_is_drawn(made, data):
    assert set(made) == NAMES
    page = set(charts(data))
    assert page - {"rewards"} == NAMES - {"ledger"} | {"ledger_entropy", "ledger_reward"}


def test_the_curve_shows_the_pages_points_and_line(made, data):
    (axes,) = made["curve"].axes
    (bars,) = axes.containers
    points = data["curve"]["points"]
    assert list(bars.lines[0].get_ydata()) == [p["value"] for p in points]
    (segments,) = [lines.get_segments() for lines in bars.lines[2]]
    drawn = [segment[:, 1].tolist() for segment in segments]
    np.testing.assert_allclose(drawn, [p["interval"] for p in points])
    lines = {line.get_label(): line for line in axes.lines}
    x, y = (lines["predicted, 95 %"].get_data()[k][-1] for k in (0, 1))
    assert y / x == pytest.approx(data["predicted"]["value"] / data["lr"])
    straight = min(data["curve"]["linear_range"], axes.get_xlim()[1])
    widths = [patch.get_width() for patch in axes.patches if patch.get_x() == 0]
    assert any(width == pytest.approx(straight) for width in widths)


def test_the_waterfall_has_the_books_rows(made, data):
    for axes, book in zip(made["ledger"].axes, data["ledger"]["books"], strict=True):
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names == [row["name"] for row in book["rows"]]
        for bar, row in zip(axes.patches, book["rows"], strict=True):
            ends = sorted((row["start"], row["start"] + row["value"]))
            drawn = sorted((bar.get_x(), bar.get_x() + bar.get_width()))
            assert drawn == pytest.approx(ends, abs=1e-15)


def test_rollouts_tokens_cells_and_pairs_are_the_pages(made, data):
    (axes,) = made["rollouts"].axes
    drawn = sorted(y for bars in axes.containers for y in bars.lines[0].get_ydata())
    assert drawn == [row["value"] for row in data["rollouts"]["rows"]]
    (axes,) = made["points"].axes
    count = sum(len(cloud.get_offsets()) for cloud in axes.collections)
    assert count == data["covariance"]["drawn"]
    (axes,) = made["cells"].axes
    shown = np.ma.filled(axes.collections[0].get_array(), 0.0)
    total = np.sum(data["covariance"]["cells"]["influence"])
    assert np.nansum(shown) == pytest.approx(total)
    pairs = made["matrix"].axes[0].images[0].get_array()
    np.testing.assert_array_equal(pairs, data["matrix"]["values"])


def test_the_trajectory_sums_from_the_first_level(made):
    lines = {line.get_label(): line for line in made["trajectory"].axes[0].lines}
    assert lines["predicted, summed"].get_ydata() == pytest.approx([0.3, 0.2, 0.1])
    assert lines["second order, summed"].get_ydata() == pytest.approx([0.3, 0.21, 0.12])


def test_files_are_the_same_every_time(made, tmp_path):
    """Without a date, and without the version that wrote them."""
    with paper_style():
        for suffix, head in ((".pdf", b"%PDF"), (".png", b"\x89PNG")):
            one, other = (image(made["curve"], suffix) for _ in range(2))
            assert one == other
            assert one.startswith(head)
            for mark in (b"CreationDate", b"Software", b"Producer (", b"Creator ("):
                assert mark not in one


@pytest.mark.slow
def test_one_style_whatever_the_user_has_set(report_run, tmp_path):
    """Other fonts and sizes of the user's change no byte, and come back."""
    code = f"""
import sys, matplotlib
before = {{"font.size": 31.0, "lines.linewidth": 9.0}}
matplotlib.rcParams.update(before)
from entropy_experiments.report.figures.write import write_figures
write_figures({str(report_run)!r}, {str(tmp_path / "b")!r}, suffixes=[".png"])
assert all(matplotlib.rcParams[name] == value for name, value in before.items())
assert "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in write_figures(report_run, tmp_path / "a", suffixes=[".png"]):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize("columns", [1, 2])
def test_widths_are_those_of_a_paper(data, columns):
    with paper_style():
        for figure in figures_of(data, columns=columns).values():
            assert figure.get_figwidth() == WIDTH[columns]
            smallest = min(
                text.get_fontsize()
                for axes in figure.axes
                for text in (axes.xaxis.label, axes.yaxis.label, *axes.texts)
            )
            assert smallest >= 6
    with pytest.raises(ValueError, match=r"columns is 3; expected one of \[1, 2\]"):
        panels(1, columns=3, height=1)


@pytest.mark.slow
def test_the_command(report_run, tmp_path):
    folder = tmp_path / "figures"
    words = ["report", str(report_run), "--figures", str(folder), "--no-html", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    expected = {f"{name}{end}" for name in NAMES - {"trajectory"} for end in (".pdf", ".png")}
    assert {path.name for path in folder.iterdir()} == expected
    found = json.loads(done.stdout)
    assert len(found["figures"]) == len(expected)
    assert found["kind"] == "influence"
    assert not {"texts", "matrix", "html"} & set(found)


def test_hostile_names_and_missing_parts_are_drawn(report_run, tmp_path):
    summary = json.loads((report_run / "summary.json").read_text())
    first = summary["evaluations"][0]
    first["what_if"][0]["name"] = "$\\frac$ " + HOSTILE[0] * 9
    first["ledger"]["entropy"]["curvature"] = None
    first["aggregate"] = dict(list(first["aggregate"].items())[:1])
    files = {"summary.json": json.dumps(summary).encode()}
    data = gather(changed(report_run, tmp_path / "odd", files))
    with paper_style():
        made = figures_of(data)
        assert set(made) == NAMES - {"trajectory"}
        for name in ("what_if", "curve", "ledger"):
            assert image(made[name]).startswith(b"\x89PNG")


def test_a_trajectory_alone(tmp_path):
    steps = write_trajectory(Steps(), tmp_path / "trajectory.json")
    words = ["report", str(steps), "--no-html", "--figures", str(tmp_path / "f")]
    done = CliRunner().invoke(app, words)
    assert f"Figures: 2 files in {tmp_path / 'f'}" in done.output
    assert {path.name for path in (tmp_path / "f").iterdir()} == {
        "trajectory.pdf",
        "trajectory.png",
    }


def test_without_matplotlib_the_error_says_how(report_run, tmp_path, monkeypatch):
    monkeypatch.setattr(style, "find_spec", lambda name: None)
    done = CliRunner().invoke(
        app, ["report", str(report_run), "--no-html", "--figures", str(tmp_path / "x")]
    )
    assert done.exit_code == 2
    assert "figures need matplotlib, not installed here: pip install" in done.output
    assert not (tmp_path / "x").exists()
