"""EntropyInfluenceRunner under the names of document 004: plan, run directory, command line."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import types
from dataclasses import replace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from entropy_experiments import (
    BatchRequest,
    EntropyInfluencePlan,
    EntropyInfluenceRunner,
    what_if_from,
)
from entropy_experiments.attribution import proxies
from entropy_experiments.attribution import token_rows as rows_module
from entropy_experiments.attribution.analyze import analyze_step
from entropy_experiments.attribution.finite import contributions
from entropy_experiments.attribution.token_rows import token_rows
from entropy_experiments.cli import app
from entropy_experiments.config import ConfigError, load_config, parse_config
from entropy_experiments.estimate.measured import measured
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.numerics.derivatives import shifted
from entropy_experiments.pipelines.influence import files
from entropy_experiments.pipelines.influence.stages import Study, in_words
from entropy_experiments.pipelines.influence.store import RunDirectory, Stage, StageStore
from entropy_experiments.pipelines.influence.summary_json import ledger_json
from entropy_experiments.pipelines.run_conditions import analysis_conditions
from entropy_experiments.report.influence_tables import influence_report
from entropy_experiments.results import numbers
from entropy_experiments.update.objective import token_coefficients
from oracles.small_study import ETAS, EVERYTHING, ROWS, SETTINGS, WHAT_IF, array, plan, settings_in
from tolerances import INVARIANT

pytestmark = pytest.mark.contract


def test_every_file_is_there_with_its_hash(study):
    folder, _, _ = study
    manifest = json.loads((folder / "manifest.json").read_text())
    names = {"summary.json", "config.yaml", "tokens.parquet", "update_rollouts.json"}
    for e in ("eval_00", "eval_01"):
        names |= {f"{e}_delta_matrix.npy", f"{e}_tokens.parquet", f"{e}_rollout_influence.npy"}
        names |= {f"{e}_per_sequence/rollouts.npy"}
        for eta in ("0.003", "0.001"):
            names |= {f"{e}_per_sequence/{part}/eta_{eta}.npy" for part in ("full", "baseline")}
        for part in ("grad", "baseline_plus_grad"):
            names.add(f"{e}_per_sequence/{part}/eta_0.001.npy")
        names |= {f"{e}_grad_eta/eta_0.001.npy", f"{e}_grad_eta/eta_0.001.json"}
        names |= {f"{e}_fisher/{part}.npy" for part in ("kernel", "cosine", "contribution")}
        names |= {f"{e}_fisher/measured.npy", f"{e}_fisher/changes.json"}
        names |= {f"plots/{e}_ledger.png", f"plots/{e}_grad_delta_samples.png"}
    names.add("eval_00_rewards.npy")
    assert set(manifest["files"]) == names
    for name, facts in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert facts == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    assert set(manifest["arrays"]) == {name for name in names if name.endswith(".npy")}
    for name, facts in manifest["arrays"].items():
        assert facts["shape"] == list(array(folder, name).shape)
        assert facts["description"]
        assert facts["units"] in ("nats", "nats per eta", "1", "index")
    assert not list(folder.rglob("*.partial"))
    stamps = [(folder / name).stat().st_mtime_ns for name in names]
    assert (folder / "manifest.json").stat().st_mtime_ns >= max(stamps)


def test_sums_of_the_matrix_are_the_influences(study):
    folder, summary, _ = study
    for evaluation in summary["evaluations"]:
        name, found = evaluation["name"], evaluation["reconstruction"]
        matrix_EN = array(folder, f"{name}_delta_matrix.npy")
        assert matrix_EN.shape == (evaluation["rollouts"], 8)
        scale = summary["reference_eta"] / summary["lr"]
        column_N = scale * array(folder, f"{name}_rollout_influence.npy")
        np.testing.assert_allclose(matrix_EN.sum(0), column_N, atol=1e-6 * found["parts"])
        assert found["relative"] < 1e-4
        lines = evaluation["ledger"]["entropy"]["lines"]
        total = sum(line["this_step"] for line in lines.values())
        assert total == pytest.approx(found["total"], abs=1e-12)
        rows = pyarrow.parquet.read_table(folder / f"{name}_tokens.parquet").to_pydict()
        assert sum(rows["influence"]) == pytest.approx(found["gradient"], abs=1e-12)
        for groups in evaluation["groups"].values():
            summed = sum(group["value"] for group in groups.values())
            assert summed == pytest.approx(found["gradient"], abs=1e-4 * found["parts"])


def test_the_study_is_analyze_step_with_a_store(study, tmp_path):
    """The same stages: what was stored and read back is what they give in memory."""
    _, summary, inputs = study
    batch, stored = inputs.evaluations[0], summary["evaluations"][0]
    step = Study(inputs, StageStore(tmp_path)).step
    with analysis_conditions():
        analysis = analyze_step(
            step.policy,
            step.optimizer,
            step.batch,
            batch.rollouts,
            replace(step.options, folds=batch.folds),
            trained=step.trained,
            reward_N=batch.reward_N,
        )
    assert stored["level"] == numbers(analysis.level)
    for name, ledger in (("entropy", analysis.ledger), ("reward", analysis.reward_ledger)):
        ours, theirs = ledger_json(ledger), stored["ledger"][name]
        assert ours["lines"] == theirs["lines"]
        for key in ("predicted", "curvature", "measured", "unexplained"):
            size = abs(theirs["predicted"]["value"])
            assert ours[key]["value"] == pytest.approx(theirs[key]["value"], abs=1e-6 * size)
    assert stored["reconstruction"]["matrix_residual"] == pytest.approx(
        analysis.matrix.total - analysis.tokens.gradient, abs=0
    )
    other = replace(step.options, max_grad_norm=0.01)  # teeth: another step is seen
    with analysis_conditions():
        clipped = analyze_step(
            step.policy, step.optimizer, step.batch, batch.rollouts, other, trained=step.trained
        )
    assert ledger_json(clipped.ledger)["lines"] != stored["ledger"]["entropy"]["lines"]


def test_measured_changes_are_those_of_measured(study):
    """Full, baseline, one rollout alone and on top of the baseline: each measured once more.

    Shared among evaluation rollouts as the first-order matrix is, not by `integrand_N`.
    """
    folder, _, inputs = study
    probe = inputs.of(inputs.evaluations[0])
    direction, stats = probe.step()
    coefficient = token_coefficients(probe.facts.objective, stats.found.scores, probe.update)
    eta, row, at = 0.001, ROWS[1], 1

    def along(total):
        parts = {"momentum": total}
        made = type(direction)(parts=parts, lr=direction.lr)
        found = measured(probe.policy, probe.evaluation, made, eta, probe.estimator, repackings=0)
        params = probe.policy.params
        base, moved = (
            score_all(probe.policy, at, probe.evaluation, microbatch=32)
            for at in (params, shifted(params, total, eta))
        )
        shared_N = contributions(base, moved, probe.evaluation, found.estimand)
        assert float(shared_N.sum()) == pytest.approx(found.value, rel=1e-4, abs=1e-9)
        return shared_N.numpy()

    from entropy_experiments.attribution.matrix import update_directions

    stack = update_directions(probe.policy, probe.update, coefficient, direction, rows=[row])
    own = {name: value[0] for name, value in stack.items()}
    base = direction.only("momentum", "decay").total
    both = {name: base[name] + value for name, value in own.items()}
    files = "eval_00_per_sequence"
    close = {"rtol": 1e-3, "atol": 1e-9}
    np.testing.assert_allclose(
        array(folder, f"{files}/full/eta_{eta:g}.npy"), along(direction.total), **close
    )
    np.testing.assert_allclose(
        array(folder, f"{files}/baseline/eta_{eta:g}.npy"), along(base), **close
    )
    grad_EN = array(folder, f"{files}/grad/eta_{eta:g}.npy")
    np.testing.assert_allclose(grad_EN[:, at], along(own), **close)
    np.testing.assert_allclose(
        array(folder, f"{files}/baseline_plus_grad/eta_{eta:g}.npy")[:, at],
        along(both) - along(base),
        **close,
    )
    assert array(folder, f"{files}/rollouts.npy").tolist() == ROWS
    total_N = array(folder, f"eval_00_grad_eta/eta_{eta:g}.npy")
    assert np.isnan(total_N).tolist() == [i not in ROWS for i in range(8)]
    # Entries of both signs cancel: rounding is that of their sizes, not of their sum.
    rounding = {"rtol": INVARIANT, "atol": INVARIANT * float(np.abs(grad_EN).sum(0).max())}
    np.testing.assert_allclose(total_N[ROWS], grad_EN.sum(0), **rounding)
    said = json.loads((folder / f"eval_00_grad_eta/eta_{eta:g}.json").read_text())
    assert [entry["rollout"] for entry in said] == ROWS
    assert {"value", "stderr", "interval", "ESS", "w_max", "w_min", "k_hat", "trusted"} <= set(
        said[0]
    )
    np.testing.assert_allclose([entry["value"] for entry in said], total_N[ROWS], **rounding)


def test_the_summary_says_what_outputs_md_names(study):
    _, summary, _ = study
    ledger = summary["ledger"]
    assert ledger == summary["evaluations"][0]["ledger"]["entropy"]
    assert {"momentum", "decay", "positive", "negative"} == set(ledger["lines"])
    assert {"this_step", "eventual", "stderr"} <= set(ledger["lines"]["positive"])
    assert {"predicted", "curvature", "measured", "unexplained"} <= set(ledger)
    assert set(summary["aggregate"]) == {"0.003", "0.001"}
    assert {"momentum", "decay", "gradient", "grad_norm"} <= set(summary["update"]["norms"])
    assert summary["plan"]["etas"] == list(ETAS)
    assert all(seconds >= 0 for seconds in summary["timings"].values())
    first, second = summary["evaluations"]
    assert first["ledger"]["reward"]["quantity"] == "reward"
    assert second["ledger"]["reward"] is None  # nothing scores fresh answers to U's prompts
    (left,) = first["leave_one_out"]
    assert (left["rollout"], left["label"]) == (1, "leave_one_out")
    names = [found["name"] for found in first["what_if"]]
    assert names == ["drop=negative", "lr=0.001"]
    assert {"frozen", "recomputed", "measured", "agrees"} <= set(
        first["what_if"][0]["confirmation"]
    )
    assert "\n".join(influence_report(summary))


def test_the_frozen_prediction_is_that_of_the_model(study):
    _, summary, _ = study
    for found in summary["evaluations"][0]["what_if"]:
        predicted, frozen = found["prediction"]["total"], found["confirmation"]["frozen"]["value"]
        parts = summary["evaluations"][0]["reconstruction"]["parts"]
        assert predicted == pytest.approx(frozen, abs=1e-4 * parts)


def test_ranked_tokens_stand_in_their_context(study):
    folder, summary, inputs = study
    evaluation = summary["evaluations"][0]
    tokenizer = inputs.probe.checkpoint.tokenizer
    rows = pyarrow.parquet.read_table(folder / "tokens.parquet").to_pydict()
    destroying = evaluation["ranked"]["destroying"]
    assert destroying
    values = [token["value"] for token in destroying]
    assert values == sorted(values)
    assert max(values) < 0
    rollouts = inputs.probe.update.rollouts
    for token in destroying:
        ids = rollouts.tokens_NS[token["rollout"]]
        assert tokenizer.decode([int(ids[token["position"]])]) == token["text"]
        before = tokenizer.decode(ids[: token["position"]].tolist())
        assert before.endswith(token["before"][-8:])
        found = [
            i
            for i, where in enumerate(zip(rows["rollout"], rows["position"], strict=True))
            if where == (token["rollout"], token["position"])
        ]
        assert rows["influence"][found[0]] == token["value"]


def test_what_ifs_from_the_saved_table_need_no_model(study, monkeypatch):
    folder, summary, _ = study

    def refuse(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("entropy_experiments.pipelines.influence.runner.open_checkpoint", refuse)
    found = what_if_from(folder, WHAT_IF, entropy_budget=summary["ledger"]["predicted"]["value"])
    for saved, evaluation in zip(found["evaluations"], summary["evaluations"], strict=True):
        for one, other in zip(saved["what_if"], evaluation["what_if"], strict=True):
            assert one["prediction"]["notes"] == other["prediction"]["notes"]
            for name in ("total", "change", "gradient", "stderr", "change_stderr"):
                expected = other["prediction"][name]
                assert one["prediction"][name] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    budget = found["evaluations"][0]["entropy_budget"]
    assert budget["linear"] == pytest.approx(summary["lr"])
    with pytest.raises(FileNotFoundError, match=r"No (summary|manifest)\.json in"):
        what_if_from(folder / "rollouts", WHAT_IF)


def snapshot(folder):
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def test_a_rerun_changes_nothing_and_computes_nothing(study, monkeypatch):
    folder, summary, _ = study
    before = snapshot(folder)

    def refuse(*_, **__):
        raise AssertionError("something was computed")

    monkeypatch.setattr("entropy_experiments.pipelines.influence.runner.gather_study", refuse)
    again = EntropyInfluenceRunner(settings_in(folder), quiet=True).run(plan(folder, **EVERYTHING))
    assert again == summary
    assert snapshot(folder) == before


def test_another_question_reuses_every_stage(study, tmp_path):
    import shutil

    folder, _, _ = study
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    settings = settings_in(copy)
    arrays = {p.name: p.read_bytes() for p in copy.glob("*.npy")}
    stages = {p.name for p in (copy / "stages").iterdir()}
    other = plan(copy, what_if=["drop_rollouts=2"], confirm=False)
    summary = EntropyInfluenceRunner(settings, quiet=True).run(other)
    assert [w["name"] for w in summary["evaluations"][0]["what_if"]] == ["drop_rollouts=2"]
    assert {p.name for p in (copy / "stages").iterdir()} == stages
    assert {p.name: p.read_bytes() for p in copy.glob("*.npy")} == arrays
    with pytest.raises(ValueError, match=r"holds another study .* --overwrite"):
        EntropyInfluenceRunner(settings, quiet=True).run(plan(copy, etas=[0.002]))
    finite = plan(copy, etas=[0.001], finite=True, evaluation_requests=[BatchRequest()])
    EntropyInfluenceRunner(settings, quiet=True).run(finite, overwrite=True)
    matrix_EN = array(copy, "eval_00_delta_matrix.npy")
    grad_EN = array(copy, "eval_00_per_sequence/grad/eta_0.001.npy")
    np.testing.assert_array_equal(matrix_EN[:, ROWS], grad_EN)
    assert np.isnan(matrix_EN[:, 1]).all()
    assert not list(copy.glob("eval_01*")), "the study that was replaced had two batches"
    assert not list(copy.rglob("eta_0.003*"))
    with pytest.raises(ValueError, match=r"measured_rollouts has \[99\]; .* 0 to 7"):
        EntropyInfluenceRunner(settings, quiet=True).run(
            plan(copy, measured_rollouts=[99]), overwrite=True
        )


def test_a_damaged_stage_is_refused_and_a_damaged_file_is_written_again(study, tmp_path):
    import shutil

    folder, summary, _ = study
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    run = RunDirectory(copy)
    assert run.finished(summary["key"])
    right = (copy / "tokens.parquet").read_bytes()
    (copy / "tokens.parquet").write_bytes(right[:-1])
    assert not run.finished(summary["key"])
    settings = settings_in(copy)
    EntropyInfluenceRunner(settings, quiet=True).run(plan(copy))
    assert (copy / "tokens.parquet").read_bytes() == right
    (copy / "tokens.parquet").unlink()
    stage = next((copy / "stages").glob("eval_00_matrix.*"))
    stage.write_bytes(stage.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"eval_00_matrix.*is damaged.*Delete it and run again"):
        EntropyInfluenceRunner(settings, quiet=True).run(plan(copy))


@pytest.mark.parametrize("by", ["overwrite", "version"])
def test_a_table_with_another_column_is_written_again(study, tmp_path, monkeypatch, by):
    """A finished study of an earlier program had "nothing to compute", and kept its old table."""
    folder, _, _ = study
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)

    def with_column(*args):
        rows = token_rows(*args)
        return {**rows, "new": rows["k"]}

    monkeypatch.setattr(files, "token_rows", with_column)
    if by == "version":
        monkeypatch.setattr(rows_module, "COLUMNS_VERSION", rows_module.COLUMNS_VERSION + 1)
    stages = {p.name: p.read_bytes() for p in (copy / "stages").iterdir()}
    EntropyInfluenceRunner(settings_in(copy), quiet=True).run(plan(copy), overwrite=by != "version")
    assert "new" in pyarrow.parquet.read_table(copy / "tokens.parquet").column_names
    assert {p.name: p.read_bytes() for p in (copy / "stages").iterdir()} == stages


def test_a_new_proxy_alone_brings_its_column_into_a_finished_study(study, tmp_path, monkeypatch):
    """One function listed: the key of the table changes, the table is made from the stages."""
    folder, summary, _ = study
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)

    def only_in_this_test(_batch, scores):
        return -scores.logprob_NS

    before = rows_module.table_version()
    monkeypatch.setattr(proxies, "PROXIES", (*proxies.PROXIES, only_in_this_test))
    assert rows_module.table_version() != before
    stages = {p.name: p.read_bytes() for p in (copy / "stages").iterdir()}
    again = EntropyInfluenceRunner(settings_in(copy), quiet=True).run(plan(copy))
    table = pyarrow.parquet.read_table(copy / "tokens.parquet").to_pydict()
    np.testing.assert_array_equal(table["proxy_only_in_this_test"], -np.array(table["logprob"]))
    assert {p.name: p.read_bytes() for p in (copy / "stages").iterdir()} == stages
    assert again["evaluations"][0]["groups"] == summary["evaluations"][0]["groups"]


def test_the_columns_of_the_table_are_those_of_its_version(study):
    """A column that is no proxy: raise COLUMNS_VERSION, so that earlier studies get it."""
    folder, _, _ = study
    names = set(pyarrow.parquet.read_table(folder / "tokens.parquet").column_names)
    assert rows_module.COLUMNS_VERSION == 2
    made = {f"proxy_{proxy.__name__}" for proxy in proxies.PROXIES}
    assert made < names
    assert {re.sub(r"\d+$", "", name) for name in names - made} == {
        *("rollout", "prompt", "position", "k", "token_id", "logprob", "probability", "entropy"),
        *("advantage", "reward", "old_logprob", "ref_logprob", "weight", "microbatch", "stderr"),
        *("coefficient_logprob", "coefficient_entropy", "slope_logprob", "slope_entropy"),
        *("influence", "stable", "counted", "text", "piece", "uid"),
        *("fold_", "slope_logprob_", "slope_entropy_"),
    }


def test_a_replaced_study_leaves_no_file(tmp_path):
    """Also where the new study was interrupted, or asked for again with another question."""
    run = RunDirectory(tmp_path)
    run.bind("a" * 64)
    run.write({"both": b"1", "old/one": b"2", "old/two": b"3"}, "a1", {})
    with pytest.raises(ValueError, match="holds another study"):
        run.bind("b" * 64)
    run.bind("b" * 64, overwrite=True)
    assert (tmp_path / "old" / "one").is_file()  # until the new study is finished
    RunDirectory(tmp_path).bind("c" * 64, overwrite=True)
    (tmp_path / "old" / "mine").write_text("no study wrote this")
    (tmp_path / "both").write_text("changed")
    run = RunDirectory(tmp_path)
    run.bind("c" * 64)
    run.write({"both": b"4", "new": b"5"}, "c1", {})
    left = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {"both", "new", "old/mine", "manifest.json", "study.json"}
    assert (tmp_path / "both").read_bytes() == b"4"
    run.write({"both": b"4", "deep/er/x": b""}, "c2", {})
    assert not (tmp_path / "new").exists()
    run.write({"both": b"4"}, "c3", {})
    assert not (tmp_path / "deep").exists()
    assert run.finished("c3")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"]["../outside"] = {}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest.json is damaged or was changed"):
        run.write({}, "c4", {})
    del manifest["digest"]  # as in a study of an earlier version
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"outside .* was tampered with"):
        run.write({}, "c4", {})


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"has files that are no study's \(thesis.tex\)"):
        RunDirectory(tmp_path).bind("0" * 64)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="is not the manifest of an influence study"):
        RunDirectory(tmp_path).manifest()


def test_a_plan_is_checked_like_a_file():
    config = parse_config({})
    with pytest.raises(ConfigError, match=r"influence.grad_chunk_size: got 0, expected 1 or more"):
        EntropyInfluencePlan(grad_chunk_size=0).applied(config)
    with pytest.raises(ConfigError, match=r"influence.etas\[0\]: got -1.0"):
        EntropyInfluencePlan(etas=[-1.0]).applied(config)
    with pytest.raises(ValueError, match="Cannot read the what-if 'drop'"):
        EntropyInfluenceRunner({}, quiet=True).run(EntropyInfluencePlan(what_if=["drop"]))
    with pytest.raises(
        ValueError, match=r"influence.learning_rates is \[0.1, 0.1\d+\]; expected step sizes"
    ):
        EntropyInfluenceRunner({}, quiet=True).run(EntropyInfluencePlan(etas=[0.1, 0.10000001]))
    with pytest.raises(ConfigError, match=r"fisher_centred is true and influence.fisher is false"):
        EntropyInfluencePlan(fisher_centred=True).applied(config)
    applied = EntropyInfluencePlan(microbatch_size=7).applied(config)
    assert applied.memory.microbatch_size == 7
    assert EntropyInfluencePlan().applied(config) is config


def test_stages_keep_what_they_are_given(tmp_path):
    store, calls = StageStore(tmp_path), []

    def compute():
        calls.append(1)
        return Stage(facts={"x": 0.1 + 0.2})

    assert [store.once("a", "k" * 64, compute).facts["x"] for _ in range(2)] == [0.1 + 0.2] * 2
    assert calls == [1]
    names = [f"t{i * 7 % 10}" for i in range(10)]
    store.put("b", "k" * 64, Stage(tensors={name: torch.ones(1) for name in names}), 0.0)
    found = store.get("b", "k" * 64)
    assert found is not None
    assert list(found.tensors) == names  # sums over them are added in this order
    assert store.get("a", "l" * 64) is None
    assert len(store) == 2


def test_progress_says_how_long(tmp_path, study):
    _, _, inputs = study
    lines = []
    found = Study(inputs, StageStore(tmp_path), say=lines.append)
    found.clock.total = 4 * found.cost
    assert found.direction.lr == found.probe.lr
    assert found.lines
    assert lines[0].startswith("the optimizer step: ")
    assert lines[1].startswith("the step by lines of the ledger: ")
    assert "about" in lines[1] or "25%" in lines[1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("step", "the optimizer step"),
        ("eval_00_tokens", "eval_00, influence of every token"),
        ("eval_01_rollouts_00", "eval_01, changes measured along single rollouts, part 1"),
        ("eval_00_without_007", "eval_00, the step without rollout 7"),
    ],
)
def test_stages_in_words(name, words):
    assert in_words(name) == words


def invoke(*arguments):
    return CliRunner().invoke(app, ["influence", *arguments])


@pytest.fixture
def runner(monkeypatch):
    """Stands in for the runner, which needs torch and a checkpoint."""

    class Runner:
        made: list = []  # noqa: RUF012

        def __init__(self, config, *, quiet):
            self.config, self.quiet = config, quiet
            Runner.made.append(self)

        def run(self, *, overwrite, momentum_batches):
            print("a library prints this")
            self.overwrite, self.momentum_batches = overwrite, momentum_batches
            return {"evaluations": [], "run_directory": "here"}

    module = types.ModuleType("entropy_experiments.pipelines.influence.runner")
    module.EntropyInfluenceRunner = Runner
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Runner


def test_the_command_hands_over_its_options(runner, tmp_path):
    out = tmp_path / "run"
    result = invoke(
        *("--config", "test_deltaH1", "--checkpoint", "step_60", "--out", str(out)),
        *("--what-if", "drop=negative", "--what-if", "lr=1e-3", "--confirm"),
        *("--entropy-budget", "-0.01", "--set", "influence.folds=4", "--overwrite", "--quiet"),
        *("--fisher", "--set", "influence.plots=false"),
    )
    assert result.exit_code == 0, result.stderr
    made = runner.made[-1]
    asked = made.config.influence
    assert asked.folder == str(out)
    assert asked.what_if == ("drop=negative", "lr=1e-3")
    assert (asked.confirm, asked.entropy_budget, asked.folds) == (True, -0.01, 4)
    assert (asked.fisher, asked.fisher_centred, asked.plots) == (True, False, False)
    assert made.config.checkpoint.path == "step_60"
    assert made.config.sampling.save == str(out / "rollouts")
    assert (made.overwrite, made.quiet) == (True, True)
    assert result.stdout.splitlines()[-1] == "Files: here"


def test_the_command_without_anything(runner):
    result = invoke("--json")
    assert json.loads(result.stdout) == {"evaluations": [], "run_directory": "here"}
    assert "a library prints this" in result.stderr
    assert runner.made[-1].config.dump() == load_config(None).dump()


def test_bad_input_has_exit_code_two(study, tmp_path):
    folder, _, _ = study
    result = invoke("--set", "influence.fold=3")
    assert result.exit_code == 2
    assert "Did you mean influence.folds?" in result.stderr
    result = invoke("--what-if", "drop")
    assert result.exit_code == 2
    assert "Cannot read the what-if 'drop'" in result.stderr
    result = invoke("--from", str(tmp_path), "--what-if", "drop=negative")
    assert result.exit_code == 2
    assert ".json in" in result.stderr
    assert "finished study" in result.stderr
    result = invoke("--from", str(folder), "--confirm")
    assert result.exit_code == 2
    assert "--confirm together with --from" in result.stderr
    words = "with the same --out, this --what-if and --confirm; finished stages are reused"
    assert words in result.stderr
    result = invoke("--from", str(folder), "--what-if", "drop=negative", "--fisher")
    assert result.exit_code == 2
    assert "--fisher together with --from: a saved table is read without a model" in result.stderr
    result = invoke("--from", str(folder))
    assert result.exit_code == 2
    assert "--from has no question" in result.stderr
    result = invoke("--from", str(folder), "--what-if", "drop=positive")
    assert result.exit_code == 0, result.stderr
    assert "eval_01:" in result.stdout
    assert "drop=positive: " in result.stdout
    result = invoke("--from", str(folder), "--what-if", "drop=positive", "--json")
    assert json.loads(result.stdout)["evaluations"][1]["name"] == "eval_01"


def test_in_double_precision_the_parts_are_the_whole(tmp_path):
    """Every line on: momentum, decay, both signs, KL and entropy bonus."""
    settings = {
        **SETTINGS,
        "checkpoint": {"dtype": "float64"},
        "update": {"beta": 0.04, "entropy_coef": 0.01},
        "rollouts": {"save": str(tmp_path / "rollouts")},
    }
    asked = plan(
        tmp_path / "run",
        evaluation_requests=[BatchRequest()],
        measured_rollouts=[0],
        etas=[0.003],
        leave_one_out=[],
        what_if=[],
    )
    summary = EntropyInfluenceRunner(settings, quiet=True).run(asked)
    found = summary["evaluations"][0]["reconstruction"]
    lines = summary["ledger"]["lines"]
    assert set(lines) == {"momentum", "decay", "positive", "negative", "kl", "entropy_bonus"}
    assert all(line["this_step"] != 0 for line in lines.values())
    assert found["relative"] < 1e-9
    assert abs(found["matrix_residual"]) < 1e-9 * found["parts"]


def test_measured_entries_have_the_slopes_of_the_matrix(tmp_path):
    """Entry by entry: both matrices share a change among the evaluation rollouts alike."""
    eta = 1e-6  # the baseline's cross term is of order eta too
    settings = {
        **SETTINGS,
        "checkpoint": {"dtype": "float64"},
        "rollouts": {"save": str(tmp_path / "rollouts")},
    }
    small = {
        "evaluation_requests": [BatchRequest()],
        "etas": [eta, 0.002],
        "per_sequence_etas": [eta],
        "leave_one_out": [],
        "what_if": [],
    }
    folder = tmp_path / "run"
    runner = EntropyInfluenceRunner(settings, quiet=True)
    runner.run(plan(folder, **small))
    first_EN = array(folder, "eval_00_delta_matrix.npy")
    influence_N = array(folder, "eval_00_rollout_influence.npy")
    runner.run(plan(folder, **small, finite=True), overwrite=True)
    finite_EN = array(folder, "eval_00_delta_matrix.npy")
    close = {"rtol": 1e-3, "atol": 1e-3 * np.abs(first_EN).max()}
    assert np.abs(influence_N[ROWS]).min() > 0
    np.testing.assert_allclose(finite_EN[:, ROWS], first_EN[:, ROWS], **close)
    folder = folder / "eval_00_per_sequence"
    both_EN = array(folder, f"baseline_plus_grad/eta_{eta:g}.npy")
    np.testing.assert_allclose(both_EN, first_EN[:, ROWS], **close)
    # The whole step is the baseline and all rollouts.
    step_E = array(folder, f"full/eta_{eta:g}.npy") - array(folder, f"baseline/eta_{eta:g}.npy")
    np.testing.assert_allclose(step_E, first_EN.sum(1), rtol=1e-3, atol=close["atol"])
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    for name in ("delta_matrix.npy", f"per_sequence/grad/eta_{eta:g}.npy"):
        told = manifest["arrays"][f"eval_00_{name}"]["description"]
        assert "each entry's slope in eta is the first-order contribution" in told


def test_a_clip_is_that_of_every_measured_change(tmp_path):
    """One step, one number; a confirmation, which never clips, says so."""
    settings = {
        **SETTINGS,
        "importance": {"clip_c": 0.01},
        "rollouts": {"save": str(tmp_path / "rollouts")},
    }
    small = {"evaluation_requests": [BatchRequest()], "measured_rollouts": [0], "etas": [0.003]}
    runner = EntropyInfluenceRunner(settings, quiet=True)
    summary = runner.run(plan(tmp_path / "run", **small, what_if=["drop_rollouts=1"]))
    (found,) = summary["evaluations"]
    lr = summary["lr"]
    stage = next((tmp_path / "run" / "stages").glob("eval_00_measured.*"))
    store = StageStore(stage.parent)
    _, key, _ = stage.name.split(".")
    kept = store.get("eval_00_measured", key)
    assert kept is not None
    step = kept.facts[f"full|{lr!r}"]
    assert step["clip_fraction"] > 0  # teeth
    ledger = found["ledger"]["entropy"]["measured"]
    assert ledger == {name: step[name] for name in ledger}
    assert ledger["noise_floor"] is not None
    assert any("clipped" in why for why in ledger["why_not"])
    assert any("clipped" in why for why in found["ledger"]["reward"]["measured"]["why_not"])
    assert any("clipped" in why for why in found["leave_one_out"][0]["measured"]["why_not"])
    assert summary["clip_c"] == 0.01
    assert found["what_if"][0]["confirmation"]["clip_c"] is None


def test_a_question_without_an_answer_costs_no_study(study, tmp_path, monkeypatch):
    import shutil

    from entropy_experiments.attribution import whatif

    folder, summary, _ = study
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    settings = settings_in(copy)
    runner = EntropyInfluenceRunner(settings, quiet=True)
    predict = whatif.repredict

    def repredict(found, text):
        if text == "lr=0.002":
            raise ValueError("no such table")
        return predict(found, text)

    def confirm(*_, **__):
        raise ValueError("no such step")

    monkeypatch.setattr(whatif, "repredict", repredict)
    monkeypatch.setattr(whatif, "confirm", confirm)
    wrong = -summary["ledger"]["predicted"]["value"]
    texts = ["lr=0.002", "lr=0.001", "lr=0.004", "drop=negative"]
    before = {p.name for p in (copy / "stages").iterdir()}
    summary_now = runner.run(plan(copy, what_if=texts, entropy_budget=wrong))
    found = summary_now["evaluations"][0]
    assert found["entropy_budget"]["budget"] == wrong
    assert "budget the other sign" in found["entropy_budget"]["error"]
    assert [one["name"] for one in found["what_if"]] == texts
    assert found["what_if"][0] == {"name": "lr=0.002", "error": "no such table"}
    assert found["what_if"][2]["prediction"]["lr"] == 0.004
    assert found["what_if"][2]["confirmation"] == {"error": "no such step"}
    told = "\n".join(influence_report(summary_now))
    assert "lr=0.002: no answer. no such table" in told
    assert "    not made: no such step" in told
    assert "nats: no answer. The entropy budget is" in told
    # Asked for in another order: a confirmation is found by its question.
    assert [found["what_if"][i] for i in (3, 1)] == summary["evaluations"][0]["what_if"]
    assert {p.name for p in (copy / "stages").iterdir()} == before
    monkeypatch.undo()
    refused = {
        r"leave_one_out has \[8\]; .* rollouts 0 to 7": {"leave_one_out": [8]},
        r"measured_rollouts has \[99\]; .* 0 to 7": {"measured_rollouts": [99]},
        r"'drop_rollouts=9' names 9; .* 0 to 7": {"what_if": ["drop_rollouts=9"]},
        r"names 1.999; .* of rollout 1 its response tokens 0 to": {
            "what_if": ["drop_tokens=1.999"]
        },
    }
    empty = tmp_path / "empty"
    settings = settings_in(copy)
    for match, changes in refused.items():
        with pytest.raises(ValueError, match=match):
            EntropyInfluenceRunner(settings, quiet=True).run(plan(empty, **changes), overwrite=True)
        assert not (empty / "stages").exists(), "something was computed before"


def test_keys_know_what_their_stages_read(study, tmp_path):
    from entropy_experiments.pipelines.influence import results as answers
    from entropy_experiments.pipelines.influence.stages import evaluations_of

    _, _, inputs = study

    def names(advantage=None, folds=None, **changes):
        """Keys of one batch's stages, none of which is computed."""
        asked = inputs.probe.config.replaced(changes, where="test") if changes else None
        study = Study(inputs, StageStore(tmp_path))
        study.asked = (asked or inputs.probe.config).influence
        (found, _) = evaluations_of(study)
        found.batch = replace(found.batch, folds=folds or found.batch.folds)
        facts = found.probe.facts
        rule = {"advantage": advantage or facts["advantage"]}
        found.probe = replace(found.probe, facts=replace(facts, values={**facts.values, **rule}))
        keys = {}

        def remember(name, key, *_):
            keys[name] = json.dumps(key)
            raise KeyError(name)

        found.stage = remember
        for stage in (
            *(lambda: found.matrix, lambda: found.tokens, lambda: found.whole),
            *(lambda: answers.entropy_stage(found), lambda: answers.reward_stage(found)),
            *(lambda: answers.left_out(found, 1), lambda: answers.fisher(found)),
            lambda: answers.confirmed(found, "drop=negative"),
        ):
            with pytest.raises(KeyError):
                stage()
        return keys

    before = names()
    assert set(before) == {
        *("matrix", "tokens", "measured", "ledger", "reward", "without_001", "confirm", "fisher"),
    }
    for change in ({"folds": 3}, {"influence.block_mb": 7}):
        after = names(**change)
        assert [name for name in before if before[name] == after[name]] == ["measured"]
    after = names(**{"influence.etas": [0.5]})
    assert {n for n in before if before[n] != after[n]} == {"measured", "ledger", "fisher"}
    after = names(**{"influence.fisher": True, "influence.fisher_centred": True})
    assert [name for name in before if before[name] != after[name]] == ["fisher"]
    assert inputs.probe.facts["advantage"] != "batch"
    after = names(advantage="batch")
    assert [name for name in before if before[name] != after[name]] == ["without_001"]
