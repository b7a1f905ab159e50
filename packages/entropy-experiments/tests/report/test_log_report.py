"""Reports of logs and folders as people have them: copied, partial, damaged, without a number."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from entropy_experiments import OfflineEntropyProbe, load_config
from entropy_experiments.cli import app
from entropy_experiments.report import words
from entropy_experiments.report.html import books
from entropy_experiments.report.html.data import gather
from entropy_experiments.report.html.from_log import UNKNOWN_UNIT, log_report
from entropy_experiments.report.html.page import render
from entropy_experiments.results import newest_log, read_log

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    changes = [
        "batch_config.B_E=6",
        "approx_delta_h.curvature=true",
        "approx_delta_h.normalize=per_sequence",
        "detailed_logging.level=standard",
    ]
    folder = tmp_path_factory.mktemp("logged")
    config = load_config("test_deltaH1").under(folder).with_overrides(changes)
    return OfflineEntropyProbe(config, quiet=True).run_mixed_probe()["log_path"]


def rewritten(log, folder, **keys):
    """A copy of the log alone, without its configuration, with other content."""
    path = folder / "entropy_probe_12-00-00_copy.json"
    content = {**read_log(log), **keys}
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "left out"}))
    return path


def test_a_log_copied_without_its_config_keeps_its_unit(log, tmp_path):
    path = rewritten(log, tmp_path)
    data = gather(path)
    assert data["unit"] == "sequence"
    assert "nats per sequence" in data["verdict"]["sentence"]
    assert "nats per sequence" in log_report(path)[1]


def test_an_earlier_log_without_its_config_says_that_it_does_not_say(log, tmp_path):
    path = rewritten(log, tmp_path, unit="left out")
    assert gather(path)["unit"] == UNKNOWN_UNIT
    assert "does not say which" in log_report(path)[1]
    (tmp_path / "entropy_probe_12-00-00_copy_config.yaml").write_text(
        "approx_delta_h: {normalize: per_sequence}"
    )
    assert gather(path)["unit"] == "sequence"


def test_a_null_of_the_loggers_own_is_told_as_one(log, tmp_path):
    found = read_log(log)
    estimates = {name: dict(e) for name, e in found["estimates"].items()}
    for name in ("deltaH1", "difference", "momentum"):
        estimates[name]["value"] = None
    sweep = [{**p, "diagnostics": {**p["diagnostics"], "w_max": None}} for p in found["sweep"]]
    lost = {**sweep[0], "eta": 9.0, "value": None}
    path = rewritten(
        log,
        tmp_path,
        estimates=estimates,
        deltaH1=None,
        sweep=[*sweep, lost],
        diagnostics={**found["diagnostics"], "w_max": None},
        nulls={"deltaH1": "not finite: nan"},
    )
    data = gather(path)
    assert data["predicted"] is None
    assert data["ledger"] is None
    assert "deltaH1 in the log is null: not finite: nan" in data["verdict"]["doubts"]
    assert "1 of" in data["absent"]["some step sizes"]
    text = render(data)
    assert "not finite: nan" in text
    assert ">–</td>" in text  # the largest weight
    said = "\n".join(log_report(path))
    assert "predicted change not a number: deltaH1 in the log is null" in said
    assert "largest –" in said


def test_an_interval_with_a_null_is_none(log, tmp_path):
    found = read_log(log)
    estimates = {name: dict(e) for name, e in found["estimates"].items()}
    estimates["deltaH_true"]["interval"] = [None, None]
    sweep = [{**point, "interval": [None, 1.0]} for point in found["sweep"]]
    data = gather(rewritten(log, tmp_path, estimates=estimates, sweep=sweep))
    assert data["measured"]["interval"] is None
    assert [point["interval"] for point in data["curve"]["points"]] == [None] * len(sweep)
    render(data)


def test_a_sweep_without_a_number_was_measured_all_the_same(log, tmp_path):
    sweep = [{**point, "value": None} for point in read_log(log)["sweep"]]
    data = gather(rewritten(log, tmp_path, sweep=sweep))
    assert data["absent"]["predicted and measured"] == "no step size has a number"


def test_a_number_that_is_not_trusted_is_no_headline(log):
    change = {"value": -0.2, "interval": [-0.3, -0.1], "trusted": True}
    said = {"update": "It", "level": 1.0, "unit": "token", "predicted": {"value": -0.1}}
    assert words.sentence(change=change, **said) == (
        "It lowers the policy’s entropy by 0.2 nats per token (95 % 0.1 to 0.3), 20.0% of it; "
        "first order predicts −0.100."
    )
    doubted = words.sentence(change={**change, "trusted": False, "why_not": ["few"]}, **said)
    assert doubted.startswith("Not trusted, for the reasons given: It lowers")
    assert words.sentence(change={**change, "trusted": False}, **said).startswith("Not trusted: It")
    assert "20.0%" not in doubted
    said["predicted"] = {"value": -0.1, "trusted": False}
    assert words.sentence(change=change, **said).endswith("predicts −0.100 (not trusted).")


@pytest.mark.parametrize(
    ("x", "digits", "told"),
    [(123.4, 3, "+123"), (-12.3, 2, "−12"), (0.007, 3, "+0.00700"), (1234.0, 3, "+1.23e+03")],
)
def test_numbers_have_no_point_at_their_end(x, digits, told):
    assert words.number(x, digits) == told


def test_a_gap_without_an_interval_has_none():
    assert words.gap({"value": 0.5, "interval": None}).endswith("paired: +0.50.")


def test_lines_of_one_book_alone_keep_their_place():
    def book(*names):
        return {"rows": [{"name": name, "kind": "line"} for name in names]}

    found = books.ledger([book("a", "c"), book("a", "b", "c", "d")])
    assert [line["name"] for line in found["lines"]] == ["a", "b", "c", "d"]


def test_units_of_a_ledger_stand_apart(log):
    data = gather(log)
    data["ledger"]["books"][0]["power"] = 0
    assert '<th class="num">entropy, nats</th>' in render(data)


def test_no_curvature_at_all_is_said(log):
    data = gather(log)
    data["curve"] |= {"linear_range": None, "curvature": {"value": 0.0, "interval": None}}
    data["curve"]["unsure"] = False
    assert "The curvature is 0: the straight line holds everywhere" in render(data)


def test_the_newest_of_many_logs(log, tmp_path):
    """The tenth of one second comes after the second, another second after both."""
    folder = tmp_path / "2025-01-15"
    folder.mkdir()
    names = [f"entropy_probe_12-00-00_s{end}.json" for end in ("", "-2", "-10")]
    for name in names:
        (folder / name).write_text("{}")
    stamp = (folder / names[0]).stat().st_mtime_ns
    for name in names:  # a file system of coarse times
        _touch(folder / name, stamp)
    assert newest_log(tmp_path) == folder / names[-1]
    _touch(folder / names[0], stamp + 10**9)
    assert newest_log(tmp_path) == folder / names[0]
    later = folder / "entropy_probe_12-00-01_s.json"
    later.write_text("{}")
    _touch(later, stamp - 10**9)  # copied
    assert newest_log(tmp_path) == later


def _touch(path, stamp):
    import os

    os.utime(path, ns=(stamp, stamp))


def test_folders_without_a_run_say_what_is_missing(log, tmp_path):
    empty, begun = tmp_path / "empty", tmp_path / "begun"
    empty.mkdir()
    (begun / "rollouts").mkdir(parents=True)
    for folder, said in ((empty, "which is empty"), (begun, "nothing that is finished")):
        answer = CliRunner().invoke(app, ["report", str(folder)])
        assert answer.exit_code == 2
        assert said in " ".join(answer.output.split())
        assert "give the same command again" in " ".join(answer.output.split())
        assert "manifest" not in answer.output
    (begun / "results.json").write_text('{"format": "entro')
    with pytest.raises(ValueError, match=r"results\.json is not JSON .*entropy-probe measure"):
        gather(begun)


def test_a_folder_with_two_answers_asks_which(log, tmp_path):
    day = tmp_path / "logs" / "2025-01-15"
    day.mkdir(parents=True)
    shutil.copy(log, day)
    assert gather(tmp_path)["kind"] == "probe"
    (tmp_path / "results.json").write_text('{"format": "entropy_experiments.measurements"}')
    with pytest.raises(ValueError, match=r"has logs .* and the results\.json .*Name the one"):
        gather(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("entropy_probe_x.json", {"schema": 1, "level": "standard"}),
        (
            "trajectory.json",
            {"format": "entropy_experiments.checkpoints.runs", "schema": 1, "steps": [{"step": 0}]},
        ),
        ("results.json", {"format": "entropy_experiments.measurements", "schema": 1}),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(json.dumps(content))
    answer = CliRunner().invoke(app, ["report", str(path)])
    assert answer.exit_code == 2, answer.output
    told = " ".join(answer.output.split())
    assert f"{name} cannot be shown: KeyError" in told
    assert "Traceback" not in told
