"""Document 002, the users' own: its quick start and its snippets, on the policy in the package.

The quick start is the document's text, run by a shell in an empty folder. Its snippets run with
smaller batches; nothing else about them is changed. (The document's
`run_probe_with_comprehensive_logging.py` is now `entropy-probe run`, with the same options.)
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from entropy_experiments.checkpoints.runs import default_checkpoint
from entropy_experiments.config import load_config, parse_config
from entropy_experiments.offline_entropy_probe import OfflineEntropyProbe
from entropy_experiments.pipelines.probe_log import DetailedLogger, read_log

pytestmark = pytest.mark.contract

QUICK_START = r"""
# Basic entropy probe run with ground truth comparison
python -c "
from entropy_experiments.offline_entropy_probe import OfflineEntropyProbe
probe = OfflineEntropyProbe.from_config_file('entropy_experiments/configs/detailed_logging_example.yaml')
results = probe.run_mixed_probe()
print(f'δH₁ prediction: {results[\"deltaH1\"]:.8f}')
print(f'Ground truth ΔH: {results[\"deltaH_true\"]:.8f}')
"
"""  # noqa: E501
EXAMPLE = "entropy_experiments/configs/detailed_logging_example.yaml"
FIRST_ORDER = {"deltaH1", "bars_dot", "curvature_term", "linear_range"}
MEASURED = {"deltaH_true", "H_upd", "diagnostics", "sweep"}
KILOBYTES = {
    "minimal": (0.3, 2),
    "standard": (5, 10),
    "detailed": (50, 500),
    "debug": (1000, 10_000),
}
NUMBER = r"(-?\d\.\d{8})"


def small(**sections):
    """The document's `config` dict, with batches that take seconds."""
    return {
        "checkpoint": {"checkpoint_path": None},
        "batch_config": {"B_E": 8, "B_U": 2, "G": 4},
        "memory_config": {"microbatch_size": 16},
        "approx_delta_h": {"curvature": False},
        "update": {"batch": "drawn"},
        "probe_rework": {"compute_delta_h1": True},
        "importance": {"enabled": True},
        **sections,
    }


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder: logs go to ./logs, as the templates say."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def checkpoint_path():
    return str(default_checkpoint())


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quick_start")
    commands = tmp_path_factory.mktemp("bin")
    python = commands / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", QUICK_START],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHONIOENCODING": "utf-8",
        },
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=folder, stdout=done.stdout, stderr=done.stderr)


def test_the_quick_start_prints_both_numbers(quick_start):
    found = re.fullmatch(
        f"δH₁ prediction: {NUMBER}\nGround truth ΔH: {NUMBER}\n", quick_start.stdout
    )
    assert found is not None, quick_start.stdout
    predicted, measured = map(float, found.groups())
    assert predicted < 0
    assert abs(predicted - measured) < 0.2 * abs(measured)


def test_the_quick_start_prints_where_its_log_is(quick_start):
    (named,) = re.findall(r"log: (\S+)", quick_start.stderr)
    assert (quick_start.folder / named).is_file()
    assert "Traceback" not in quick_start.stderr
    assert "Warning" not in quick_start.stderr


def test_the_quick_start_writes_the_three_documented_files(quick_start):
    written = list((quick_start.folder / "logs").glob("*/entropy_probe_*"))
    assert len(written) == 3
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", p.parent.name) for p in written)
    stem = r"entropy_probe_\d\d-\d\d-\d\d_step_13"
    endings = {re.sub(stem, "", p.name) for p in written}
    assert endings == {".json.gz", "_summary.json", "_config.yaml"}
    assert len({p.name.split("step_13")[0] for p in written}) == 1
    by_ending = {p.name.split("step_13")[1]: p for p in written}
    log = read_log(by_ending[".json.gz"])
    summary = json.loads(by_ending["_summary.json"].read_text())
    printed = re.findall(NUMBER, quick_start.stdout)
    assert [f"{log[name]:.8f}" for name in ("deltaH1", "deltaH_true")] == printed
    assert [f"{summary[name]:.8f}" for name in ("deltaH1", "deltaH_true")] == printed
    assert load_config(by_ending["_config.yaml"]).dump() == load_config(EXAMPLE).dump()
    etas = [point["eta"] / log["learning_rate"] for point in log["sweep"]]
    assert etas == pytest.approx([1 / 8, 1 / 2, 1, 2, 4])


def test_basic_analysis(here, checkpoint_path):
    """Snippet 1, and `Importance Sampling Quality Analysis`."""
    probe = OfflineEntropyProbe.from_config_file("configs/detailed_logging_example.yaml")
    assert probe.config.dump() == load_config(EXAMPLE).dump()
    probe = OfflineEntropyProbe(
        probe.config.replaced(
            {
                "batch_config.B_E": 16,
                "approx_delta_h.curvature": False,
                "memory_config.microbatch_size": 16,
                "estimator.eta_sweep": False,
            }
        )
    )
    results = probe.run_mixed_probe(checkpoint_path)
    delta_h1_pred = results["deltaH1"]
    delta_h_true = results["deltaH_true"]
    bars_dot = results["bars_dot"]
    learning_rate = results["learning_rate"]
    assert delta_h1_pred == pytest.approx(bars_dot * learning_rate, rel=1e-12)
    assert learning_rate == 0.003
    prediction_error = abs(results["deltaH1"] - results["deltaH_true"])
    assert prediction_error / abs(delta_h_true) < 0.5
    ess, w_max = results["diagnostics"]["ESS"], results["diagnostics"]["w_max"]
    assert 8 < ess <= 16
    assert results["diagnostics"]["w_min"] <= 1 <= w_max
    assert results["H_upd"] == pytest.approx(results["H_orig"] + delta_h_true)
    assert (results["B_E"], results["B_U"]) == (16, 48)
    assert results["avg_generation_length"] > 1
    assert 0 < results["avg_reward"] < 1
    assert {"sampling", "first_order", "measured", "total"} <= results["timing"].keys()
    assert Path(results["log_path"]).is_file()


def test_debugging_with_detailed_logs(here, checkpoint_path, capsys):
    """Snippet 2: `Log file path will be printed`, and what it names holds real data."""
    config = small()
    config["detailed_logging"] = {
        "enabled": True,
        "level": "debug",
        "log_sequences": True,
        "log_tokens": True,
        "log_raw_tensors": True,
    }
    probe = OfflineEntropyProbe(config)
    results = probe.run_mixed_probe(checkpoint_path)
    assert f"log: {results['log_path']}" in capsys.readouterr().err
    log = read_log(results["log_path"])
    for rows in (log["evaluation_rollouts"], log["update_rollouts"]):
        assert len(rows) == 8
        for row in rows:
            count = row["tokens"]
            assert len(row["token_ids"]) == len(row["token_logprob"]) == count > 0
            # A token that is nearly certain has log-prob 0 to the last digit of fp32.
            assert all(x <= 0 for x in row["token_logprob"])
            assert all(x >= 0 for x in row["token_entropy"])
            assert len({*row["token_logprob"], *row["token_entropy"]}) > count
            assert sum(row["token_logprob"]) == pytest.approx(row["logprob"], rel=1e-4)
    raw = log["raw"]["evaluation"]["logprob_NS"]
    assert raw["shape"][0] == len(raw["values"]) == 8
    assert log["level"] == "debug"


def test_ground_truth_only(here, checkpoint_path):
    """Snippet 3."""
    config = small()
    config["probe_rework"]["compute_delta_h1"] = False
    config["importance"]["enabled"] = True
    probe = OfflineEntropyProbe(config, quiet=True)
    results = probe.run_mixed_probe(checkpoint_path)
    assert isinstance(results["deltaH_true"], float)
    assert not FIRST_ORDER & results.keys()
    assert results.keys() >= MEASURED
    assert not {"deltaH1", "gradient", "direct", "difference"} & results["estimates"].keys()
    assert "  the prediction was skipped (predict.enabled: false)" in (results["verdict"])
    assert "first_order" not in results["timing"]
    assert "deltaH1" not in read_log(results["log_path"])


def test_prediction_only(here, checkpoint_path):
    config = small()
    config["importance"]["enabled"] = False
    results = OfflineEntropyProbe(config, quiet=True).run_mixed_probe(checkpoint_path)
    assert {"deltaH1", "bars_dot"} <= results.keys()
    assert not MEASURED & results.keys()
    assert not {"deltaH_true", "difference"} & results["estimates"].keys()
    assert "  the measurement was skipped (measure.enabled: false)" in results["verdict"]
    assert "measured" not in results["timing"]


def test_batch_size_scaling(here, checkpoint_path):
    """The loop of `Batch Size Scaling Studies`: one dict, changed and used again."""
    config = small()
    config["probe_rework"]["compute_delta_h1"] = False
    seen = {}
    for B_E in [8, 16]:
        config["batch_config"]["B_E"] = B_E
        probe = OfflineEntropyProbe(config, quiet=True)
        results = probe.run_mixed_probe(checkpoint_path)
        seen[B_E] = results["B_E"], results["diagnostics"]["rollouts"]
    assert seen == {8: (8, 8), 16: (16, 16)}
    assert len(list(here.glob("logs/*/*_summary.json"))) == 2


@pytest.mark.slow
def test_logs_have_the_documented_sizes(tmp_path):
    """At the documented batch sizes: E of 64 prompts, and the batch that training recorded."""
    settings = {
        "memory_config": {"microbatch_size": 16},
        "approx_delta_h": {"curvature": False, "method": "reverse"},
        "rollouts": {"save": str(tmp_path / "rollouts")},
    }
    found, decode = OfflineEntropyProbe(settings, quiet=True).findings()
    assert len(found.evaluation) == 64
    for level, (least, most) in KILOBYTES.items():
        config = parse_config(
            {"detailed_logging": {"level": level, "output_directory": str(tmp_path)}}
        )
        path = DetailedLogger(config).write(found, decode)
        assert path is not None
        size = len(gzip.decompress(path.read_bytes())) / 1000
        assert least <= size <= most, f"{level}: {size:.1f} KB"


@pytest.mark.slow
def test_the_command_line_with_a_checkpoint(tmp_path, checkpoint_path):
    """`--config ... --checkpoint ...` as the document has it; stdout is JSON and nothing else."""
    smaller = (
        *("batch_config.B_E=16", "batch_config.B_U=2", "batch_config.G=4", "update.batch=drawn"),
        *("approx_delta_h.curvature=false", "estimator.eta_sweep=false"),
        "memory_config.microbatch_size=16",
    )
    options = [word for change in smaller for word in ("--set", change)]
    out = tmp_path / "out"
    run = ["run", "--config", EXAMPLE, "--checkpoint", checkpoint_path, "--out", str(out), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "entropy_experiments.cli", *run, *options],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    assert results == json.loads((out / "results.json").read_text())
    assert {"deltaH1", "deltaH_true", "bars_dot", "learning_rate"} <= results.keys()
    assert results["B_E"] == 16
    assert len(list((out / "logs").glob("*/entropy_probe_*_step_13*"))) == 3
    assert Path(results["log_path"]).is_relative_to(out)
    assert (out / "rollouts" / "evaluation" / "manifest.json").is_file()
    assert (out / "rollouts" / "update" / "manifest.json").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]  # nothing beside it
