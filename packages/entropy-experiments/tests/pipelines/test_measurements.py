"""EntropyMeasurements and ExperimentPlan: measured, linear and quadratic changes over repeats."""

from __future__ import annotations

import json
import re
import statistics
import sys
import types
from dataclasses import replace

import pytest
import yaml
from scipy import stats
from typer.testing import CliRunner

from entropy_experiments import EntropyMeasurements, ExperimentPlan
from entropy_experiments.cli import app
from entropy_experiments.config import load_config, parse_config
from entropy_experiments.pipelines.measure import measurement_report
from entropy_experiments.pipelines.probe import OfflineEntropyProbe
from entropy_experiments.report.compare import compare
from entropy_experiments.report.html.data import gather
from entropy_experiments.report.html.page import write_report
from oracles.report_runs import read
from report.test_file_formats import at, names, rows

pytestmark = pytest.mark.contract

SMALL = {
    "batch_config": {"B_E": 6, "B_U": 2, "G": 4},
    "memory_config": {"microbatch_size": 32},
    "update": {"batch": "drawn"},
}
ETAS = [0.001, 0.003]


def settings(folder, **sections):
    return parse_config({**SMALL, **sections}).under(folder)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    plan = ExperimentPlan(
        compute_true=True,
        compute_linear=True,
        compute_linquad=True,
        eta_list=ETAS,
        repeats=3,
        clip_overrides=[0.05],
    )
    return folder, plan, EntropyMeasurements(settings(folder), quiet=True).run_experiments(plan)


def test_every_number_of_every_repeat(experiment):
    _, _, results = experiment
    assert len(results["repeats"]) == 3
    assert [repeat["seed"] for repeat in results["repeats"]] == [0, 1, 2]
    for which in ("evaluation_rollouts", "update_rollouts"):
        assert len({repeat[which] for repeat in results["repeats"]}) == 3  # fresh batches
    for repeat in results["repeats"]:
        assert [point["eta"] for point in repeat["points"]] == ETAS
        low, high = repeat["points"]
        assert high["linear"]["value"] == pytest.approx(3 * low["linear"]["value"])
        for point in repeat["points"]:
            for name in ("linear", "linquad"):
                gap = point[name]["value"] - point["measured"]["value"]
                assert point["differences"][name]["value"] == pytest.approx(gap, abs=1e-15)
                # Paired: the same rollouts, so the difference is known better than either.
                assert point["differences"][name]["stderr"] < point["measured"]["stderr"]
            assert set(point["clips"]) == {"0.05"}
            assert {"ESS", "w_max", "w_min"} <= set(point["diagnostics"])
        bend_low = low["linquad"]["value"] - low["linear"]["value"]
        bend_high = high["linquad"]["value"] - high["linear"]["value"]
        assert bend_high == pytest.approx(9 * bend_low)


def test_the_summary_is_over_repeats(experiment):
    _, _, results = experiment
    for i, entry in enumerate(results["summary"]):
        values = [repeat["points"][i]["measured"]["value"] for repeat in results["repeats"]]
        assert entry["measured"]["mean"] == pytest.approx(statistics.fmean(values))
        stderr = stats.sem(values)
        assert entry["measured"]["stderr"] == pytest.approx(stderr)
        half = stats.t.ppf(0.975, 2) * stderr
        low, high = entry["measured"]["interval"]
        assert (low, high) == pytest.approx(
            (entry["measured"]["mean"] - half, entry["measured"]["mean"] + half)
        )
        assert set(entry["differences"]) == {"linear", "linquad"}
        assert set(entry["clips"]) == {"0.05"}
    lines = "\n".join(measurement_report(results))
    assert "over 3 repeats of 6 prompts" in lines
    assert "linquad - measured" in lines


def test_the_report_reads_the_folder(experiment):
    """In words and as a page; every number of it is one of results.json, or follows from it."""
    folder, _, results = experiment
    shown = CliRunner().invoke(app, ["report", str(folder)], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("\n".join(measurement_report(results)))
    page = folder / "report.html"
    assert f"Report: {page}" in shown.stdout
    assert "Mean over 3 repeats of 6 fresh prompts each" in read(page.read_text(encoding="utf-8"))
    page.unlink()

    data = gather(folder)
    at = next(one for one in results["summary"] if one["eta"] == results["learning_rate"])
    assert data["measured"]["value"] == at["measured"]["mean"]
    assert data["measured"]["interval"] == at["measured"]["interval"]
    assert data["predicted"]["value"] == at["linear"]["mean"]
    assert data["difference"]["interval"] == at["differences"]["linear"]["interval"]
    bend = at["linquad"]["mean"] - at["linear"]["mean"]
    assert data["curve"]["curvature"]["value"] == pytest.approx(bend)
    assert [point["value"] for point in data["curve"]["points"]] == [
        one["measured"]["mean"] for one in results["summary"]
    ]
    worst = min(one["points"][1]["diagnostics"]["ESS"] for one in results["repeats"])
    assert data["weights"][1]["ESS"] == worst
    settings = yaml.safe_load(data["environment"]["config"])
    assert settings["data"]["evaluation_prompts"] == 6
    assert results["config"]["batch_config"]["B_E"] == 6  # a documented file keeps its keys
    json.dumps(data, allow_nan=False)


def test_the_page_of_file_formats_has_every_name(experiment):
    _, _, results = experiment
    said = [name for cell, _ in rows("## results.json of measure") for name in names(cell)]
    said = [name for name in said if name not in ("mean", "stderr", "interval", "trusted")]
    for name in said:
        assert at(results, name) or name in ("repeats", '"token"', '"sequence"'), name
    assert set(results) == {re.split(r"[.\[]", name)[0] for name in said if '"' not in name}


def test_without_the_learning_rate_among_the_etas(tmp_path):
    """The prediction is a line, so it is known there; the measurement is not, and is not told."""
    plan = ExperimentPlan(eta_list=[0.001])
    results = EntropyMeasurements(settings(tmp_path), quiet=True).run_experiments(plan)
    data, (entry,) = gather(tmp_path / "results.json"), results["summary"]
    lr = results["learning_rate"]
    assert lr == pytest.approx(0.003)
    assert data["predicted"]["value"] == pytest.approx(entry["linear"]["mean"] * lr / 0.001)
    assert data["measured"] is None
    assert "at η 0.001 instead of the learning rate 0.003" in data["verdict"]["sentence"]
    assert "One repeat of 6 prompts" in data["verdict"]["points"][0]


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ("compute_true", "no line was computed (measure.first_order: false)"),
        ("compute_linear", "nothing was measured (measure.measured: false)"),
        ("compute_linquad", "nothing was measured (measure.measured: false)"),
    ],
)
def test_what_was_not_computed_is_said(experiment, tmp_path, only, words):
    """Of the same results as if only one of the three had been asked for."""
    _, _, results = experiment
    keep = {"compute_true": "measured", "compute_linear": "linear", "compute_linquad": "linquad"}
    results = json.loads(json.dumps(results))
    for one in (*results["summary"], *(p for r in results["repeats"] for p in r["points"])):
        for name in set(keep.values()) - {keep[only]}:
            del one[name]
        one["differences"] = {}
    (tmp_path / "results.json").write_text(json.dumps(results))
    data = gather(tmp_path)
    assert data["absent"]["predicted and measured"] == words
    assert data["curve"] is None
    assert (data["measured"] is None) == (only != "compute_true")
    assert (data["predicted"] is None) == (only != "compute_linear")
    text = read(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "the policy’s entropy by" in text


def test_two_measurements_side_by_side(experiment, tmp_path):
    folder, plan, _ = experiment
    other = settings(tmp_path, batch_config={**SMALL["batch_config"], "B_E": 12})
    EntropyMeasurements(other, quiet=True).run_experiments(replace(plan, repeats=1))
    found = compare([folder, tmp_path])
    assert found["kind"] == "measure"
    assert [row["B_E"] for row in found["runs"]] == [6, 12]
    assert found["differs"] == {"data.evaluation_prompts": [6, 12]}


def test_a_file_of_another_version_is_refused(experiment, tmp_path):
    _, _, results = experiment
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**results, "schema": 99}))
    with pytest.raises(
        ValueError, match=r"schema 99; this version reads .*Run `entropy-probe measure` again"
    ):
        gather(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is no log, or cut short"):
        gather(path)


def test_one_repeat_is_the_probe(tmp_path):
    """Same rollouts, same step: the numbers of `entropy-probe run`, to rounding."""
    config = settings(tmp_path / "a", approx_delta_h={"variance": False})
    found = EntropyMeasurements(config, quiet=True).run_experiments(ExperimentPlan())
    probe = OfflineEntropyProbe(config.under(tmp_path / "b"), quiet=True).run_mixed_probe()
    (point,) = found["repeats"][0]["points"]
    assert point["measured"]["value"] == pytest.approx(probe["deltaH_true"], rel=1e-6)
    assert point["linear"]["value"] == pytest.approx(probe["deltaH1"], rel=1e-6)
    assert "linquad" not in point
    assert found["summary"][0]["measured"]["interval"] == point["measured"]["interval"]


def test_it_is_saved_and_a_rerun_changes_nothing(experiment, monkeypatch):
    folder, plan, results = experiment
    path = folder / "results.json"
    assert json.loads(path.read_text()) == results
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}

    def refuse(*_, **__):
        raise AssertionError("something was drawn")

    target = "entropy_experiments.pipelines.measure.gather_study"
    monkeypatch.setattr(target, refuse)
    again = EntropyMeasurements(settings(folder), quiet=True).run_experiments(plan)
    assert again == results
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before
    # Finished repeats serve a longer experiment; the next one is what is drawn.
    more = ExperimentPlan(**{**plan.dump(), "repeats": 4})
    with pytest.raises(AssertionError, match="something was drawn"):
        EntropyMeasurements(settings(folder), quiet=True).run_experiments(more)


def test_an_interrupted_experiment_continues(tmp_path, monkeypatch, capsys):
    from entropy_experiments.pipelines import measure as runner

    real, calls = runner.gather_study, []

    def twice(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(runner, "gather_study", twice)
    plan = ExperimentPlan(compute_true=False, repeats=2)
    with pytest.raises(KeyboardInterrupt):
        EntropyMeasurements(settings(tmp_path), quiet=True).run_experiments(plan)
    results = EntropyMeasurements(settings(tmp_path)).run_experiments(plan)
    assert len(calls) == 3  # the first repeat was not drawn again
    assert "repeat 2 of 2" in capsys.readouterr().err
    assert "measured" not in results["repeats"][0]["points"][0]
    assert results["summary"][0]["differences"] == {}


def test_the_plan_is_checked():
    with pytest.raises(ValueError, match="The plan computes nothing"):
        ExperimentPlan(compute_true=False, compute_linear=False)
    with pytest.raises(ValueError, match="repeats is 0; expected 1 or more"):
        ExperimentPlan(repeats=0)
    with pytest.raises(ValueError, match=r"eta_list is .*; expected one or more different"):
        ExperimentPlan(eta_list=[0.1, 0.1])
    with pytest.raises(ValueError, match=r"clip_overrides has \[-1\]; expected numbers above 0"):
        ExperimentPlan(clip_overrides=[-1])
    assert ExperimentPlan(True, True, False, [0.1], 2, [None]).repeats == 2  # the document's order
    config = parse_config(
        {"experiment": {"repeats": 3, "eta_list": [0.1], "compute_linquad": True}}
    )
    plan = ExperimentPlan.of(config)
    assert (plan.repeats, plan.eta_list, plan.compute_linquad) == (3, (0.1,), True)


def test_repeats_of_loaded_rollouts_are_refused(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("entropy_experiments.pipelines.measure.open_checkpoint", refuse)
    config = settings(tmp_path, rollouts={"load": str(tmp_path)}, experiment={"repeats": 2})
    with pytest.raises(ValueError, match=r"measure.repeats is 2 with sampling.load .*same roll"):
        EntropyMeasurements(config, quiet=True).run_experiments()


def test_a_curvature_that_is_not_defined_is_refused(tmp_path):
    config = settings(tmp_path, approx_delta_h={"method": "reverse"})
    with pytest.raises(
        ValueError, match=r"measure.second_order is true with .*'reverse'.*method: auto"
    ):
        EntropyMeasurements(config, quiet=True).run_experiments(
            ExperimentPlan(compute_linquad=True)
        )


def invoke(*arguments):
    return CliRunner().invoke(app, ["measure", *arguments])


@pytest.fixture
def measurements(monkeypatch):
    class Measurements:
        made: list = []  # noqa: RUF012

        def __init__(self, config, *, quiet):
            self.config, self.quiet = config, quiet
            Measurements.made.append(self)

        def run_experiments(self):
            print("a library prints this")
            return {"summary": [1.5]}

    module = types.ModuleType("entropy_experiments.pipelines.measure")
    module.EntropyMeasurements = Measurements
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        "entropy_experiments.report.measurements.measurement_report",
        lambda results: [f"mean {results['summary'][0]}"],
    )
    return Measurements


def test_the_command(measurements, tmp_path):
    result = invoke("--json")
    assert json.loads(result.stdout) == {"summary": [1.5]}
    assert "a library prints this" in result.stderr
    assert measurements.made[-1].config.dump() == load_config(None).dump()
    result = invoke(
        *("--config", "test_deltaH1", "--checkpoint", "step_60", "--out", str(tmp_path)),
        *("--set", "experiment.repeats=4", "--quiet"),
    )
    assert result.stdout.splitlines()[-1] == "mean 1.5"
    made = measurements.made[-1]
    assert made.config.measure.repeats == 4
    assert made.config.output.results_file == str(tmp_path / "results.json")
    assert made.quiet is True
    result = invoke("--set", "experiment.repeat=4")
    assert result.exit_code == 2
    assert "Did you mean experiment.repeats?" in result.stderr
