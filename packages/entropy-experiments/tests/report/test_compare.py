"""Runs side by side: every number is that run's own, and what cannot be compared is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from typer.testing import CliRunner

from entropy_experiments.cli import app
from entropy_experiments.cli.report import _on_the_screen
from entropy_experiments.config import parse_config
from entropy_experiments.pipelines.probe_log import DetailedLogger, read_log
from entropy_experiments.report.compare import compare, table_lines, tables
from entropy_experiments.report.html.compare import comparison_figures, write_comparison
from oracles.small_study import BATCHES

pytestmark = pytest.mark.naive

NOON = datetime(2025, 1, 15, 12)


def logged(probed, folder, *, checkpoint=None, hours=0, level="standard", **sections):
    """A log of the small probe, as if of another checkpoint or under another setting."""
    findings, decode = probed
    settings = {"level": level, "output_directory": str(folder)}
    config = parse_config({**BATCHES, "detailed_logging": settings, **sections})
    findings = replace(findings, checkpoint=checkpoint or findings.checkpoint)
    now = NOON + timedelta(hours=hours)
    return DetailedLogger(config).write(findings, decode, now=now)


@pytest.fixture(scope="module")
def three(probed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    names = ("step_10", "step_20", "step_30")
    return [logged(probed, folder, checkpoint=n, hours=i) for i, n in enumerate(names)]


def test_each_row_is_the_runs_own(three):
    found = compare(three)
    assert found["kind"] == "probe"
    assert [row["label"] for row in found["runs"]] == ["step_10", "step_20", "step_30"]
    assert [row["step"] for row in found["runs"]] == [10, 20, 30]
    for row, path in zip(found["runs"], three, strict=True):
        log = read_log(path)
        assert row["predicted"]["value"] == log["deltaH1"]
        assert row["measured"]["interval"] == log["estimates"]["deltaH_true"]["interval"]
        assert row["difference"]["value"] == log["estimates"]["difference"]["value"]
        assert row["relative_error"] == abs(log["difference"] / log["deltaH_true"])
        assert (row["B_E"], row["B_U"]) == (8, 2)
        assert row["weights"]["ESS"] == pytest.approx(log["diagnostics"]["ESS"], rel=1e-5)
        assert row["seconds"] == log["timing"]["total"]
    assert found["differs"] == {}
    assert found["scaling"] is None
    json.dumps(found, allow_nan=False)


def test_validation_counts_what_it_says(three):
    found = compare(three)["validation"]
    log = read_log(three[0])
    gap, measured = (log["estimates"][name] for name in ("difference", "deltaH_true"))
    inside = measured["interval"][0] <= log["deltaH1"] <= measured["interval"][1]
    covers = gap["interval"][0] <= 0 <= gap["interval"][1]
    assert found["runs"] == found["with_interval"] == found["with_paired_interval"] == 3
    assert found["inside_interval"] == 3 * inside
    assert found["difference_covers_zero"] == 3 * covers
    assert found["mean_relative_error"] == pytest.approx(
        abs(log["difference"] / log["deltaH_true"])
    )
    assert found["correlation"] is None  # three equal pairs have none


def test_scaling_finds_the_power(probed, tmp_path):
    """Standard errors made to fall as B_E^-0.5: the power is found, the setting named."""
    paths = []
    for i, size in enumerate((8, 32, 128)):
        sections = {"batch_config": {**BATCHES["batch_config"], "B_E": size}}
        path = logged(probed, tmp_path, hours=i, **sections)
        paths.append(path.with_name(path.name.removesuffix(".gz")))
        log = read_log(path)
        log["B_E"] = size
        for name in ("deltaH1", "deltaH_true"):
            log["estimates"][name]["stderr"] *= math.sqrt(8 / size)
        paths[-1].write_text(json.dumps(log))
        path.unlink()
    found = compare(paths)
    assert found["scaling"] == pytest.approx({"predicted": -0.5, "measured": -0.5})
    assert found["differs"] == {"data.evaluation_prompts": [8, 32, 128]}
    assert [row["label"] for row in found["runs"]] == [
        f"evaluation_prompts {size}" for size in (8, 32, 128)
    ]
    text = "\n".join(table_lines(found))
    assert "predicted B_E^−0.50, measured B_E^−0.50" in text
    roots = [row[5] for table in tables(found) if table.title == "Batch size" for row in table.rows]
    assert len(set(roots)) == 1
    drawn = comparison_figures(found)
    assert set(drawn) == {"changes", "validation", "scaling", "weights"}
    axis = drawn["scaling"]["layout"]["xaxis"]
    assert (axis["tickvals"], axis["ticktext"]) == ([8, 32, 128], ["8", "32", "128"])


def sized(probed, folder, sizes, **more):
    paths = []
    for i, size in enumerate(sizes):
        sections = {"batch_config": {**BATCHES["batch_config"], "B_E": size}}
        keys = {name: values[i] for name, values in more.items()}
        path = logged(probed, folder, hours=i, **sections, **keys)
        log = {**read_log(path), "B_E": size}
        paths.append(path.with_name(path.name.removesuffix(".gz")))
        paths[-1].write_text(json.dumps(log))
        path.unlink()
    return paths


def test_sizes_that_repeat_have_a_tick_each(probed, tmp_path):
    seeds = [{"master_seed": seed} for seed in (0, 1, 0)]
    found = compare(sized(probed, tmp_path, (8, 8, 32), probe_rework=seeds))
    assert set(found["scaling"]) == {"predicted", "measured"}  # seeds may differ
    axis = comparison_figures(found)["scaling"]["layout"]["xaxis"]
    assert (axis["tickvals"], axis["ticktext"]) == ([8, 32], ["8", "32"])


def test_no_power_is_fitted_across_what_else_differs(probed, tmp_path):
    names = ("step_1", "step_2")
    found = compare(sized(probed, tmp_path / "a", (8, 32), checkpoint=names))
    assert found["scaling"] is None
    assert "the runs differ in checkpoint, too" in found["not_scaled"]
    assert "differ in checkpoint, too" in "\n".join(table_lines(found))
    assert "scaling" not in comparison_figures(found)
    modes = [{"is_mode": mode} for mode in ("snis", "per_decision")]
    found = compare(sized(probed, tmp_path / "b", (8, 32), importance=modes))
    assert "the runs differ in measure.weighting" in found["not_scaled"]
    paths = sized(probed, tmp_path / "c", (8, 32))
    assert compare(paths)["scaling"] is not None
    paths[0].with_name(f"{paths[0].stem}_config.yaml").unlink()
    assert "no configuration" in compare(paths)["not_scaled"]


def test_weights_say_of_which_step_size_they_are(probed, tmp_path):
    paths = []
    for i in range(2):
        path = logged(probed, tmp_path, checkpoint=f"step_{i}", hours=i)
        log = read_log(path)
        for point in log["sweep"]:
            point["eta"] *= 3
        paths.append(path.with_name(f"other_{i}.json"))
        paths[-1].write_text(json.dumps(log))
    found = compare(paths)
    (table,) = [t for t in tables(found) if t.title == "Importance weights"]
    nearest = 3 * log["learning_rate"]
    assert float(table.rows[0][table.head.index("at η")]) == pytest.approx(nearest, rel=1e-2)


def test_settings_of_other_commands_do_not_differ(probed, tmp_path):
    paths = [
        logged(probed, tmp_path, checkpoint=f"step_{i}", hours=i, experiment={"repeats": 1 + i})
        for i in range(2)
    ]
    assert compare(paths)["differs"] == {}


def test_the_command_in_words_as_json_and_as_a_page(three, tmp_path):
    runs = [str(path) for path in three]
    done = CliRunner().invoke(app, ["report", *runs])
    assert done.exit_code == 0, done.output
    for title in ("Changes", "Estimator validation", "Batch size", "Importance weights"):
        assert title in done.output
    assert done.output.count("step_20") == 4
    done = CliRunner().invoke(app, ["report", *runs, "--json"])
    assert json.loads(done.stdout)["validation"]["runs"] == 3
    page = tmp_path / "deep" / "three.html"
    done = CliRunner().invoke(app, ["report", *runs, "--html", str(page)])
    assert done.output.splitlines()[-1] == f"Report: {page}"
    text = page.read_text()
    assert text.count('<div class="chart" data-figure="') == 3
    assert "default-src &#39;none&#39;" in text
    assert write_comparison(three, tmp_path / "again.html").read_text() == text
    assert "<noscript>" in text  # a page without its drawings says why


@pytest.mark.parametrize("width", ["60", "200"])
def test_on_a_screen_no_number_is_cut_short(three, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    found = compare(three)
    found["runs"][0]["label"] = "[red]step[/red] " + "x" * 30
    _on_the_screen(found)
    out = capsys.readouterr().out
    assert "…" not in out
    assert "[red]step[/red]" in out  # no markup of rich's
    assert "Importance weights" in out


def test_labels_are_text(probed, tmp_path):
    """A checkpoint's name is hostile, too."""
    bad = "<img src=x onerror=alert(1)>"
    paths = [logged(probed, tmp_path, checkpoint="step_1")]
    path = logged(probed, tmp_path, checkpoint="step_2", hours=1)
    log = {**read_log(path), "checkpoint": bad}
    other = path.with_name("entropy_probe_x.json")
    other.write_text(json.dumps(log))
    text = write_comparison([*paths, other], tmp_path / "x.html").read_text()
    assert bad not in text
    assert "&lt;img src=x" in text


def test_what_cannot_be_compared_is_refused(three, probed, tmp_path):
    with pytest.raises(ValueError, match="1 run to compare; expected two or more"):
        compare(three[:1])
    with pytest.raises(ValueError, match=r"step_10\.json\.gz: given twice"):
        compare([three[0], three[1], three[0]])
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**read_log(three[0]), "unit": "sequence"}))
    with pytest.raises(ValueError, match=r"nats per token, .* in nats per sequence .*one unit"):
        compare([three[0], other])
    old = []
    for i in range(2):  # logs of before they had a unit, copied alone
        old.append(tmp_path / f"old_{i}.json")
        content = {**read_log(three[i]), "checkpoint": f"step_{i}"}
        old[-1].write_text(json.dumps({k: v for k, v in content.items() if k != "unit"}))
    with pytest.raises(ValueError, match=r"does not say whether it is per token .*_config\.yaml"):
        compare(old)
    steps = tmp_path / "trajectory.json"
    one = {"value": -0.1, "interval": None, "stderr": None, "trusted": True}
    step = {"step": 0, "level": {**one, "value": 0.3}, "predicted_sum": one, "measured_sum": one}
    content = {
        "format": "entropy_experiments.checkpoints.runs",
        "schema": 1,
        "unit": "token",
        "steps": [{**step, "predicted": one, "measured": one, "reward": None}],
        "last": {**one, "value": 0.2},
        "total": dict.fromkeys(("predicted", "measured", "fresh"), one),
    }
    steps.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"is a log, .*trajectory\.json is a trajectory: .*one kind"
    ):
        compare([three[0], steps])
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**read_log(three[0]), "schema": 0}))
    with pytest.raises(ValueError, match=r"old\.json .* schema 0; this version reads .* 1\. Run"):
        compare([three[0], old])
    for words in (["--figures", "x"], ["--linearity"], ["--trajectory", str(steps)]):
        done = CliRunner().invoke(app, ["report", *map(str, three), *words])
        assert done.exit_code == 2
        assert f"{words[0]} with 3 runs: these are about one run" in done.output


def test_minimal_logs_have_fewer_tables(probed, tmp_path):
    """No intervals, no weights: nothing is made up."""
    names = ("step_1", "step_2")
    paths = [
        logged(probed, tmp_path, checkpoint=n, hours=i, level="minimal")
        for i, n in enumerate(names)
    ]
    found = compare(paths)
    assert {table.title for table in tables(found)} == {
        "Changes",
        "Estimator validation",
        "Batch size",
    }
    assert found["validation"]["inside_interval"] is None
    assert found["runs"][0]["weights"] is None
    assert set(comparison_figures(found)) == {"changes", "validation"}
