"""The log of a run holds what its level says: real values, field by field, and never NaN."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from entropy_experiments.config import parse_config
from entropy_experiments.findings import results_of
from entropy_experiments.pipelines.probe_log import (
    CORE,
    NULLS,
    DetailedLogger,
    messages,
    newest_log,
    read_log,
)
from entropy_experiments.results import numbers
from oracles.small_study import BATCHES

pytestmark = pytest.mark.naive

NOON = datetime(2025, 1, 15, 12, 0, 0)
CONTEXT = {"evaluation_rollouts", "update_rollouts", "raw"}


@pytest.fixture(scope="module")
def found(probed):
    return probed


def logger(folder: Path, level: str, **switches) -> DetailedLogger:
    settings = {"level": level, "output_directory": str(folder), **switches}
    return DetailedLogger(parse_config({**BATCHES, "detailed_logging": settings}))


def written(found, folder: Path, level: str, **switches) -> dict:
    path = logger(folder, level, **switches).write(*found, now=NOON)
    assert path is not None
    return strictly(path)


def strictly(path: Path) -> dict:
    """JSON without NaN and Infinity, which Python would accept."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {path}"))


def test_minimal_has_the_core_numbers_alone(found, tmp_path):
    log, results = written(found, tmp_path, "minimal"), results_of(found[0])
    assert set(log) == {"format", "schema", "level", *CORE}
    for name in CORE:
        assert log[name] == results[name]
    assert log["timing"]["total"] > 0


def test_standard_adds_statistics_that_are_those_of_the_batches(found, tmp_path):
    log, findings = written(found, tmp_path, "standard"), found[0]
    assert not CONTEXT & set(log)
    update = log["batches"]["update"]
    assert log["batches"]["evaluation"]["rollouts"] == 8
    assert update["rollouts"] == 8
    assert update["retries"] == findings.retries
    length_N = findings.update.rollouts.tokens_N.double()
    for name, spread in (
        ("length", length_N),
        ("reward", findings.update.reward_N),
        ("advantage", findings.update.advantage_NS[findings.update.rollouts.response_NS]),
    ):
        assert update[name]["mean"] == pytest.approx(float(spread.double().mean()))
        assert (update[name]["min"], update[name]["max"]) == (
            float(spread.min()),
            float(spread.max()),
        )
    weights = findings.change.diagnostics["weights"]
    assert log["diagnostics"]["ESS"] == weights.ess
    assert log["diagnostics"]["clip_fraction"] == weights.clip_fraction == 0
    vector = log["update_vector"]
    assert vector["grad_norm"] == findings.stats.grad_norm > 0
    assert vector["part_norms"].keys() == {"momentum", "decay", "gradient"}
    for name in ("deltaH1", "deltaH_true", "difference", "direct", "state", "curvature_term"):
        estimate = log["estimates"][name]
        assert {"value", "stderr", "interval", "noise_floor", "trusted", "why_not"} <= set(estimate)
        assert estimate["interval"][0] <= estimate["value"] <= estimate["interval"][1]
    assert log["provenance"]["evaluation_rollouts"] == findings.evaluation.fingerprint
    assert log["provenance"]["files"]


def test_detailed_adds_every_rollout(found, tmp_path):
    log, (findings, decode) = written(found, tmp_path, "detailed"), found
    assert CONTEXT & set(log) == {"evaluation_rollouts", "update_rollouts"}
    assert len(log["evaluation_rollouts"]) == len(log["update_rollouts"]) == 8
    rollouts, scores = findings.evaluation, findings.evaluation_scores
    logweight_N = findings.change.diagnostics["weights"].logweight_N
    for i, row in enumerate(log["evaluation_rollouts"]):
        inside_S = rollouts.response_NS[i]
        prompt = rollouts.tokens_NS[i][rollouts.attention_NS[i] & ~inside_S].tolist()
        assert row["prompt"] == decode(prompt) != ""
        assert row["response"] == decode(rollouts.tokens_NS[i][inside_S].tolist()) != ""
        assert row["tokens"] == int(inside_S.sum()) > 0
        assert row["logprob"] == pytest.approx(float(scores.logprob_NS[i].sum())) != 0
        assert row["entropy"] != 0
        assert row["logweight"] == float(logweight_N[i]) != 0
        assert "token_ids" not in row
    parts = [row["integrand"] for row in log["evaluation_rollouts"]]
    assert sum(parts) == pytest.approx(log["deltaH_true"])
    rewards = torch.tensor([row["reward"] for row in log["update_rollouts"]])
    assert torch.equal(rewards.double(), findings.update.reward_N.double())
    for row in log["update_rollouts"]:
        assert {"advantage", "logprob", "prompt", "response", "truncated"} <= row.keys()


def test_debug_adds_every_token_and_the_tensors(found, tmp_path):
    log, (findings, _) = written(found, tmp_path, "debug"), found
    for rows, rollouts, scores in (
        (log["evaluation_rollouts"], findings.evaluation, findings.evaluation_scores),
        (log["update_rollouts"], findings.update.rollouts, findings.stats.found.scores),
    ):
        for i, row in enumerate(rows):
            inside_S = rollouts.response_NS[i]
            assert row["token_ids"] == rollouts.tokens_NS[i][inside_S].tolist()
            assert row["token_logprob"] == pytest.approx(scores.logprob_NS[i][inside_S].tolist())
            assert row["token_entropy"] == pytest.approx(scores.entropy_NS[i][inside_S].tolist())
            assert sum(row["token_logprob"]) == pytest.approx(row["logprob"], rel=1e-5)
    raw = log["raw"]
    for name, expected in (
        ("tokens_NS", findings.evaluation.tokens_NS),
        ("response_NS", findings.evaluation.response_NS),
        ("logprob_NS", findings.evaluation_scores.logprob_NS),
        ("entropy_NS", findings.evaluation_scores.entropy_NS),
    ):
        stored = raw["evaluation"][name]
        assert stored["dtype"] == str(expected.dtype).removeprefix("torch.")
        assert torch.equal(torch.tensor(stored["values"], dtype=expected.dtype), expected), name
    advantage = raw["update"]["advantage_NS"]
    assert advantage["shape"] == list(findings.update.advantage_NS.shape)
    for name, gradient in findings.stats.found.gradient.items():
        stored = torch.tensor(raw["loss_gradient"][name]["values"], dtype=gradient.dtype)
        assert torch.equal(stored, gradient)
    assert sum(raw["shares"]["gradient"].values()) == pytest.approx(1)


def test_a_gradient_too_large_for_text_is_named_not_written(found, tmp_path, monkeypatch):
    monkeypatch.setattr("entropy_experiments.pipelines.probe_log.RAW_GRADIENT", 10)
    log = written(found, tmp_path, "debug")
    assert log["raw"]["loss_gradient"] == "left out: 4224 elements, more than 10"


def test_switches_only_take_away(found, tmp_path):
    full = written(found, tmp_path, "debug")
    textless = written(found, tmp_path, "debug", log_sequences=False)
    assert set(full) - set(textless) == {"evaluation_rollouts", "update_rollouts"}
    tokenless = written(found, tmp_path, "debug", log_tokens=False)
    assert set(full["evaluation_rollouts"][0]) - set(tokenless["evaluation_rollouts"][0]) == {
        "token_ids",
        "token_logprob",
        "token_entropy",
    }
    assert "raw" not in written(found, tmp_path, "debug", log_raw_tensors=False)
    modest = written(found, tmp_path, "standard", log_tokens=True, log_raw_tensors=True)
    assert not CONTEXT & set(modest)


def test_each_level_has_all_that_the_one_before_has(found, tmp_path):
    logs = [written(found, tmp_path, x) for x in ("minimal", "standard", "detailed", "debug")]
    for less, more in pairwise(logs):
        assert set(less) <= set(more)
        assert len(json.dumps(less)) < len(json.dumps(more))


def test_three_files_under_the_date(found, tmp_path):
    path = logger(tmp_path, "standard").write(*found, now=NOON)
    assert path == tmp_path / "2025-01-15" / "entropy_probe_12-00-00_step_13.json.gz"
    stem = "entropy_probe_12-00-00_step_13"
    assert sorted(p.name for p in path.parent.iterdir()) == [
        f"{stem}.json.gz",
        f"{stem}_config.yaml",
        f"{stem}_summary.json",
    ]
    summary = strictly(path.parent / f"{stem}_summary.json")
    assert set(summary) == {"format", "schema", *CORE}
    assert summary["deltaH1"] == read_log(path)["deltaH1"]
    text = (path.parent / f"{stem}_config.yaml").read_text()
    again = parse_config(yaml.safe_load(text))  # the exact config, ready to be run again
    assert again.dump() == logger(tmp_path, "standard")._config.dump()
    assert findings_hash(found) in text


def findings_hash(found) -> str:
    return found[0].provenance["evaluation_rollouts"]


def test_uncompressed(found, tmp_path):
    path = logger(tmp_path, "standard", compress=False).write(*found, now=NOON)
    assert path.name == "entropy_probe_12-00-00_step_13.json"
    packed = logger(tmp_path / "z", "standard").write(*found, now=NOON)
    assert read_log(path) == read_log(packed)


def test_the_same_findings_give_the_same_bytes(found, tmp_path):
    one, other = (
        logger(tmp_path / name, "detailed").write(*found, now=NOON).read_bytes() for name in "ab"
    )
    assert one == other


def test_two_runs_within_a_second_keep_their_files(found, tmp_path):
    first, second = (logger(tmp_path, "minimal").write(*found, now=NOON) for _ in range(2))
    assert first != second
    assert len(list(first.parent.iterdir())) == 6


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("name", ["step_13", "my_summary_run"])
def test_max_files_keeps_the_newest_runs(found, tmp_path, compress, name):
    findings = replace(found[0], checkpoint=name)
    mine = tmp_path / "2025-01-15" / "notes_summary.json"
    mine.parent.mkdir()
    mine.write_text("mine")
    for hour in range(0, 60, 12):
        logger(tmp_path, "minimal", max_files=2, compress=compress).write(
            findings, found[1], now=NOON + timedelta(hours=hour)
        )
    assert mine.read_text() == "mine"
    left = sorted(p.name for p in tmp_path.rglob("entropy_probe_*"))
    ending = ".json.gz" if compress else ".json"
    kept = [f"entropy_probe_{hour}-00-00_{name}" for hour in ("00", "12")]
    assert left == sorted(
        f"{stem}{end}" for stem in kept for end in (ending, "_summary.json", "_config.yaml")
    )
    days = {p.parent.name for p in tmp_path.rglob("entropy_probe_*")}
    assert days == {"2025-01-17"}


def test_switched_off(found, tmp_path):
    assert logger(tmp_path, "debug", enabled=False).write(*found) is None
    assert not list(tmp_path.iterdir())


def test_what_is_not_a_number_is_null(found, tmp_path):
    """A linear range of infinity, a single prompt's standard error: null, and still JSON."""
    findings = replace(found[0], linear_range=float("inf"))
    log = strictly(logger(tmp_path, "debug").write(findings, found[1], now=NOON))
    assert log["linear_range"] is None
    assert log["nulls"]["linear_range"] == NULLS["linear_range"]


def test_every_null_has_its_reason(found, tmp_path):
    """By name where a field may lack; by place where a number should have been finite."""
    log = written(found, tmp_path, "standard")
    lacking = {
        name for e in log["estimates"].values() for name, value in e.items() if value is None
    }
    assert lacking
    assert lacking <= set(log["nulls"])
    broken = found[0].evaluation_scores._replace(
        logprob_NS=torch.full_like(found[0].evaluation_scores.logprob_NS, float("nan"))
    )
    path = logger(tmp_path, "debug").write(replace(found[0], evaluation_scores=broken), found[1])
    bad = strictly(path)  # a run of hours is not lost to one NaN
    assert bad["evaluation_rollouts"][0]["logprob"] is None
    assert bad["nulls"]["evaluation_rollouts[0].logprob"] == "not finite: nan"
    assert "more numbers that are not finite" in bad["nulls"]["and elsewhere"]


def test_messages_note_retries_norms_and_times(found, tmp_path):
    findings = found[0]
    log = written(found, tmp_path, "standard")
    assert log["messages"] == messages(findings)
    sampling, update, *_, times = log["messages"]
    assert f"{findings.retries} group(s) drawn again" in sampling or findings.retries == 0
    assert "no group drawn again" in messages(replace(findings, retries=0))[0]
    assert "drawn again" not in messages(replace(findings, retries=None))[0]
    assert f"gradient norm {findings.stats.grad_norm:.3g}" in update
    for part, norm in findings.stats.part_norms.items():
        assert f"{part} {norm:.3g}" in update
    for name, took in findings.timing.items():
        assert f"{name} {took:.2g}" in times
    assert "messages" not in written(found, tmp_path, "minimal")


# Field by field.


def estimates_of(findings):
    """Every estimate that a log has, from where the run has it."""
    predicted = findings.predicted
    return {
        "H_orig": findings.level,
        "deltaH1": predicted.total,
        "bars_dot": predicted.total / findings.lr,
        "deltaH1_to_go": findings.to_go,
        "baseline": predicted.lines["momentum"] + predicted.lines["decay"],
        **predicted.lines,
        "direct": predicted.total.diagnostics["direct"],
        "state": predicted.total.diagnostics["state"],
        "gradient_eventual": predicted.lines["gradient"] / (1 - findings.momentum_decay),
        "curvature_term": findings.bend,
        "deltaH_true": findings.measured[findings.lr],
        "H_upd": findings.level + findings.measured[findings.lr],
        "difference": predicted.total - findings.measured[findings.lr],
    }


def test_every_field_of_a_standard_log_is_the_runs_own(found, tmp_path):
    log, f = written(found, tmp_path, "standard"), found[0]
    weights = f.measured[f.lr].diagnostics["weights"]
    expected = {
        "format": "entropy_experiments.probe_log",
        "schema": 1,
        "level": "standard",
        "checkpoint": f.checkpoint,
        "learning_rate": f.lr,
        "unit": f.level.estimand.unit,
        "H_orig": f.level.value,
        "B_E": 8,
        "B_U": 2,
        "avg_generation_length": float(f.evaluation.response_NS.sum(1).double().mean()),
        "avg_reward": float(f.update.reward_N.double().mean()),
        "update": "hypothetical",
        "assumed": dict(f.assumed),
        "not_verifiable": list(f.not_verifiable),
        "notes": list(f.notes),
        "timing": dict(f.timing),
        "deltaH1": f.predicted.total.value,
        "bars_dot": f.predicted.total.value / f.lr,
        "mode": "jvp",
        "deltaH1_to_go": f.to_go.value,
        "curvature_term": f.bend.value,
        "linear_range": f.linear_range,
        "deltaH_true": f.measured[f.lr].value,
        "H_upd": f.level.value + f.measured[f.lr].value,
        "difference": f.predicted.total.value - f.measured[f.lr].value,
        "messages": messages(f),
        "provenance": json.loads(json.dumps(dict(f.provenance))),
        "update_vector": {
            "loss": f.stats.loss,
            "step": f.stats.step,
            "grad_norm": f.stats.grad_norm,
            "clipped_norm": f.stats.clipped_norm,
            "clip_factor": f.stats.clip_factor,
            "microbatches": f.stats.microbatches,
            "precision": dict(f.stats.precision),
            "part_norms": dict(f.stats.part_norms),
        },
        "diagnostics": {
            "ESS": weights.ess,
            "ESS_fraction": weights.ess_fraction,
            "w_max": weights.w_max,
            "w_min": weights.w_min,
            "clip_fraction": weights.clip_fraction,
            "k_hat": weights.k_hat,
            "kl": weights.kl,
            "samples_needed": weights.samples_needed,
            "rollouts": weights.rollouts,
        },
    }
    elsewhere = {"sweep", "estimates", "batches", "nulls"}
    assert set(log) == set(expected) | elsewhere
    for name, value in expected.items():
        assert log[name] == value, name
    own = estimates_of(f)
    assert set(log["estimates"]) == set(own)
    for name, estimate in own.items():
        same_estimate(log["estimates"][name], estimate)
    assert [point["eta"] for point in log["sweep"]] == sorted(f.measured)
    for point in log["sweep"]:
        change = f.measured[point["eta"]]
        same_estimate(point, change)
        assert point["diagnostics"]["ESS"] == pytest.approx(
            change.diagnostics["weights"].ess, rel=1e-5
        )


def same_estimate(told, estimate):
    """Values to the last digit, error bars to six."""
    assert told["value"] == pytest.approx(estimate.value, rel=1e-12)
    for name, value in numbers(estimate).items():
        if name not in ("value", "trusted", "why_not") and value is not None:
            assert told[name] == pytest.approx(value, rel=6e-6), name
    assert (told["trusted"], told["why_not"]) == (estimate.trusted, list(estimate.why_not))
    if estimate.interval is not None:
        assert told["interval"] == pytest.approx(list(estimate.interval), rel=6e-6)


def test_every_field_of_a_rollout_is_the_runs_own(found, tmp_path):
    """Of the detailed and the debug level; no field is left unchecked."""
    log, f = written(found, tmp_path, "debug"), found[0]
    weights = f.change.diagnostics["weights"]
    for rows, rollouts, scores, more in (
        (
            log["evaluation_rollouts"],
            f.evaluation,
            f.evaluation_scores,
            {
                "logweight": weights.logweight_N,
                "weight": weights.logweight_N.exp(),
                "integrand": f.change.diagnostics["integrand_N"],
            },
        ),
        (
            log["update_rollouts"],
            f.update.rollouts,
            f.stats.found.scores,
            {"reward": f.update.reward_N},
        ),
    ):
        for i, row in enumerate(rows):
            inside_S = rollouts.response_NS[i]
            expected = {
                "prompt_id": int(rollouts.prompt_N[i]),
                "tokens": int(inside_S.sum()),
                "truncated": bool(rollouts.truncated_N[i]),
                "logprob": float(scores.logprob_NS[i][inside_S].sum()),
                "token_ids": rollouts.tokens_NS[i][inside_S].tolist(),
                **{name: float(value_N[i]) for name, value_N in more.items()},
            }
            for name, value in expected.items():
                assert row[name] == pytest.approx(value), name
            entropy = float(scores.entropy_NS[i][inside_S].sum())
            if "reward" in row:
                assert row["entropy"] == pytest.approx(entropy)
                advantage = float(f.update.advantage_NS[i][inside_S].double().mean())
                assert row["advantage"] == pytest.approx(advantage, abs=1e-6)
            texts = {"prompt", "response", "entropy", "advantage"}
            arrays = {"token_logprob", "token_entropy"}
            assert set(row) <= set(expected) | texts | arrays
    assert {"logweight", "weight", "integrand"} <= set(log["evaluation_rollouts"][0])


# Reading.


def test_what_is_no_log_is_refused_by_name(found, tmp_path):
    path = logger(tmp_path, "standard").write(*found, now=NOON)
    with pytest.raises(FileNotFoundError, match=r"No log .*nowhere\.json"):
        read_log(tmp_path / "nowhere.json")
    beside = path.with_name(path.name.replace(".json.gz", "_summary.json"))
    with pytest.raises(ValueError, match=r"is no log of .* not the summary beside it"):
        read_log(beside)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is no log, or cut short"):
        read_log(path)


def test_the_newest_log_of_a_folder(found, tmp_path):
    assert newest_log(tmp_path) is None
    logs = [
        logger(tmp_path / "logs", "minimal").write(*found, now=NOON + timedelta(hours=hour))
        for hour in (30, 0)
    ]
    assert newest_log(tmp_path) == newest_log(tmp_path / "logs") == logs[0]


def test_a_log_of_another_schema_is_refused(found, tmp_path):
    path = logger(tmp_path, "minimal", compress=False).write(*found, now=NOON)
    path.write_text(path.read_text().replace('"schema":1', '"schema":99'))
    with pytest.raises(ValueError, match=r"schema 99; this version reads .* 1\. A newer version"):
        read_log(path)
